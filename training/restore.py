"""Where a run's weights come from: random values, a base model, or the run's own last checkpoint."""

# NeMo-Run reads the fields' types to parse overrides: no `from __future__ import annotations`, no `X | Y`

from dataclasses import dataclass
from typing import Optional

from nemo import lightning as nl


@dataclass(kw_only=True)
class StartFrom(nl.AutoResume):
    """NeMo's AutoResume with the paths set by the launcher; it searches for no checkpoint by itself.

    Args:
        base: an HF model (local folder or hub id) whose weights the run starts from, with a new optimizer state.
            The launcher imports it and sets `restore_config`; `--resume` sets `resume_from_path` instead.
    """

    base: Optional[str] = None
