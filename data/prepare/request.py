"""What a user can ask of `data prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.prepare.sources import TXT_UNITS


@dataclass(frozen=True)
class PrepareRequest:
    """What the user asks for.

    Args:
        inputs: files, globs and folders (recursive).
        output: folder of the prepared corpus.
        tokenizer: local folder or hub id of a fast tokenizer.
        field: JSON field or column that holds the text.
        split: shares of train, validation, test; any positive numbers.
        seed: another seed gives another choice of validation and test documents.
        dedup: keep only the first of documents with the same text.
        workers: processes; None means one a core.
        on_error: "stop" at an unusable record, or "skip" and count it.
        resume: continue an interrupted run; False starts again.
        overwrite: replace a corpus, or an interrupted run, that was made differently.
        txt_unit: what one document of a .txt file is: "file", "line" or "paragraph" (blank lines between).
        special_text: "plain" encodes "<|endoftext|>" inside a document as text, "control" as the token.
        encoder: "auto" (gigatoken where the oracle agrees) or "hf".
        shard_bytes: input bytes a shard, at which progress is saved.
    """

    inputs: Sequence[str]
    output: Path
    tokenizer: str
    field: str = "text"
    split: tuple[float, float, float] = (0.98, 0.01, 0.01)
    seed: int = 1234
    dedup: bool = False
    workers: int | None = None
    on_error: str = "stop"
    resume: bool = True
    overwrite: bool = False
    txt_unit: str = "file"
    special_text: str = "plain"
    encoder: str = "auto"
    shard_bytes: int = 32 << 20

    def settings(self) -> dict[str, Any]:
        """The options that decide the bytes of the corpus, beside the sources and the tokenizer."""
        return {
            "field": self.field,
            "split": [round(share / sum(self.split), 12) for share in self.split],
            "seed": self.seed,
            "dedup": self.dedup,
            "txt_unit": self.txt_unit,
            "special_text": self.special_text,
            "shard_bytes": self.shard_bytes,
        }

    def check(self) -> None:
        """Raise a UserError for an option that cannot be."""
        choices = {
            "--txt-unit": (self.txt_unit, TXT_UNITS),
            "--on-error": (self.on_error, ("stop", "skip")),
            "--special-text": (self.special_text, ("plain", "control")),
            "--encoder": (self.encoder, ("auto", "hf")),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise UserError(f"{name}: unknown value", expected=" or ".join(allowed), found=repr(value))
        if len(self.split) != 3 or min(self.split) <= 0:
            raise UserError(
                "--split: each of train, validation, test needs a share",
                expected="three numbers above 0, such as 98,1,1",
                found=",".join(map(str, self.split)),
                do="give the split that you do not want a small share: Megatron loops for ever on an empty one",
            )
        if self.workers is not None and self.workers < 1:
            raise UserError("--workers: too few", expected="1 or more", found=str(self.workers))
