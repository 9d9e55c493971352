"""What a user can ask of `data prepare`: each option with its default and its help text, also for the command line."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.options import option
from data.prepare.sources import SUPPORTED

TXT_UNITS = ("file", "line", "paragraph")


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """The inputs and options of one prepared corpus.

    `shard_bytes` is no option of the command line: the input bytes per shard, the unit in which work is divided among
    the workers and progress is saved. Neither is `chat_template`: the tokenizer's, where `chat` is asked for.
    """

    inputs: list[str] = option(f"Files, globs, folders (recursively), hf://OWNER/NAME@REVISION: {SUPPORTED}.")
    output: Path = option("Folder of the prepared corpus, such as corpora/mine.")
    tokenizer: str = option("A local folder or a hub id of a fast tokenizer, such as Qwen/Qwen2.5-0.5B.")
    field: str = option("The field of .jsonl, or the column of .csv and .parquet, with the text.", default="text")
    split: str = option("Shares of train,validation,test; any positive numbers, such as 80,10,10.", default="98,1,1")
    seed: int = option("Another seed selects other validation and test documents.", default=1234)
    dedup: bool = option("Keep only the first of documents with the same text.", default=False)
    workers: int | None = option("Number of processes; by default one per core.", default=None)
    on_error: str = option("At an unusable record: stop, or skip it and count it.", default="stop")
    txt_unit: str = option("What one document of a .txt file is: file, line or paragraph.", default="file")
    chat: bool = option(
        "The field holds messages (role, content): encode them by the chat template (--field messages --chat).",
        default=False,
    )
    as_text: str = option("More suffixes to read as text, for source code (--as-text .py,.c).", default="")
    special_text: str = option(
        "What '<|endoftext|>' inside a document becomes: plain text, or the control token.", default="plain"
    )
    encoder: str = option("auto (gigatoken where its ids equal HF's) or hf.", default="auto")
    overwrite: bool = option("Replace a corpus, or an interrupted run, made with other options.", default=False)
    shard_bytes: int = 32 << 20
    chat_template: str = ""

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of train, validation and test, summing to 1.

        Raises:
            UserError: `split` is not three positive numbers.
        """
        try:
            numbers = [float(word) for word in self.split.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 3 or min(numbers) <= 0:
            raise UserError(
                "--split: each of train, validation, test needs a share",
                expected="three numbers above 0, such as 98,1,1",
                found=repr(self.split),
                do="give a split that you do not need a small share: Megatron loops for ever on an empty one",
            )
        return tuple(round(number / sum(numbers), 12) for number in numbers)

    @property
    def text_suffixes(self) -> tuple[str, ...]:
        """The suffixes of --as-text, in lower case and with their dot."""
        words = [word.strip().lower() for word in self.as_text.split(",")]
        return tuple(word if word.startswith(".") else f".{word}" for word in words if word)

    def settings(self) -> dict[str, Any]:
        """The options that decide the bytes of the corpus, besides the sources and the tokenizer."""
        chat = {"chat_template": hashlib.sha256(self.chat_template.encode()).hexdigest()[:16]} if self.chat else {}
        return {
            "field": self.field,
            "split": list(self.shares),
            "seed": self.seed,
            "dedup": self.dedup,
            "txt_unit": self.txt_unit,
            "special_text": "control" if self.chat else self.special_text,  # what a template writes is control
            "shard_bytes": self.shard_bytes,
            **chat,
        }

    def check(self) -> None:
        """Check the values of all options.

        Raises:
            UserError: one of them is not possible.
        """
        choices = {
            "--txt-unit": (self.txt_unit, TXT_UNITS),
            "--on-error": (self.on_error, ("stop", "skip")),
            "--special-text": (self.special_text, ("plain", "control")),
            "--encoder": (self.encoder, ("auto", "hf")),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise UserError(
                    f"{name}: unknown value",
                    expected=" or ".join(allowed),
                    found=repr(value),
                    do=f"{name} {allowed[0]}",
                )
        if self.workers is not None and self.workers < 1:
            raise UserError("--workers: too few", expected="1 or more", found=str(self.workers), do="--workers 1")
        _ = self.shares
