"""Which files the weights of a NeMo checkpoint need, and how long each must be: read from weights/.metadata as data.

The file is a pickle of torch's `Metadata`. Here every class that it names becomes an inert record, so that nothing is
imported or called: neither torch, which this folder does without, nor what a file from elsewhere may name.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class _Record:
    """Stands for an object of any class: takes its state, and does nothing."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:  # of torch's TensorProperties it is a tuple
        if isinstance(state, dict):
            self.__dict__.update(state)


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Record


def needed_bytes(weights: Path) -> dict[str, int]:
    """File name -> the bytes that it must have at least, of every file that weights/.metadata names.

    Raises:
        ValueError: there is no such file, or it cannot be read.
    """
    ends: dict[str, int] = {}
    try:
        with (weights / ".metadata").open("rb") as stream:
            stored = vars(_InertUnpickler(stream).load())["storage_data"]
        for one in map(vars, stored.values()):
            ends[str(one["relative_path"])] = max(ends.get(one["relative_path"], 0), one["offset"] + one["length"])
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return ends
