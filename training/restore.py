"""Where a run's weights come from: random values, a base model, or the run's own last checkpoint."""

# NeMo-Run reads the fields' types to parse overrides: no `from __future__ import annotations`, no `X | Y`

from dataclasses import dataclass
from typing import Any, Optional

from nemo import lightning as nl

from common.errors import UserError


@dataclass(kw_only=True)
class StartFrom(nl.AutoResume):
    """NeMo's AutoResume with the paths set by the launcher; it searches for no checkpoint by itself.

    Args:
        base: an HF model (local folder or hub id) whose weights the run starts from, with a new optimizer state.
            The launcher imports it and sets `restore_config`; `--resume` sets `resume_from_path` instead.
    """

    base: Optional[str] = None

    def setup(self, trainer: Any, model: Any = None) -> None:
        """Set where the trainer restores from; NeMo's `context/` is never loaded, because its files are programs.

        io.json there names functions to call and pickles to read, and nemo_toolkit 2.3 does both. What it would bring,
        the tokenizer, comes from the corpora.

        Raises:
            UserError: `restore_config.load_artifacts`, which is NeMo's default.
        """
        if self.restore_config is not None and self.restore_config.load_artifacts:
            raise UserError(
                f"{self.restore_config.path}/context is not loaded",
                expected="resume.restore_config.load_artifacts=False: weights only",
                found="load_artifacts=True, which runs the functions that context/io.json names",
                do="resume.restore_config.load_artifacts=False (the tokenizer is that of the corpora), or resume.base",
            )
        super().setup(trainer, model)
