"""Damaged sample indices are noticed and built again, with the samples that they had."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.sample_index import check_blend, check_indices, replace_if_wrong

LENGTHS = np.array([40, 7, 300, 64, 1], dtype=np.int32)
CORPUS = np.array([0, 1, 2, 4], dtype=np.int32)  # document 3 belongs to another split
SEQ = 50


def _indices() -> dict[str, Any]:
    """Two epochs, as Megatron lays them out."""
    documents = np.array([2, 0, 4, 1, 1, 4, 2, 0], dtype=np.int32)
    begins = np.concatenate(([0], np.cumsum(LENGTHS[documents])))
    positions = np.arange(0, begins[-1] - 1, SEQ)
    at = np.searchsorted(begins, positions, side="right") - 1
    samples = np.stack([at, positions - begins[at]], axis=1).astype(np.int32)
    return {"documents": documents, "samples": samples, "order": np.array([3, 0, 1, 2, 5, 4, 6, 8, 7, 12, 11, 10, 9])}


def _check(found: dict[str, Any]) -> str:
    return check_indices(**found, corpus=CORPUS, lengths=LENGTHS, seq_length=SEQ)


def _set(name: str, place: Any, value: int) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        found[name][place] = value

    return change


def _cut(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.update({name: found[name][:-1]})


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "order zeroed": (_set("order", slice(None), 0), "repeats some and leaves others out"),
    "one repeated": (_set("order", 3, 5), "repeats some"),
    "outside": (_set("order", 3, 99), "repeats some"),
    "order cut": (_cut("order"), "12 entries for 13 samples"),
    "documents zeroed": (_set("documents", slice(None), 0), "documents repeated or left out"),
    "a document of another split": (_set("documents", 0, 3), "documents repeated"),
    "a document that does not exist": (_set("documents", 0, 9), "a document outside 0 to 4"),
    "documents cut": (_cut("documents"), "7 documents in all, of a split of 4"),
    "samples zeroed": (_set("samples", slice(None), 0), "sample 1 does not begin 50 tokens after"),
    "an offset flipped": (_set("samples", (5, 1), 1 << 30), "after the end of its document"),
    "a place flipped": (_set("samples", (5, 0), 1 << 30), "outside the documents"),
    "another shape": (lambda found: found.update(samples=found["samples"].ravel()), "arrays of the shapes"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_of_the_index_is_noticed(case: str) -> None:
    damage, words = DAMAGE[case]
    found = _indices()
    assert _check(found) == ""
    damage(found)
    assert words in _check(found)


def test_damage_of_a_blend_is_noticed() -> None:
    datasets, samples = np.array([0, 1, 0, 0, 1], dtype=np.int16), np.array([0, 0, 1, 2, 1])
    assert check_blend(datasets, samples, 2) == ""
    assert "repeated or left out" in check_blend(datasets, np.zeros_like(samples), 2)
    assert "repeated or left out" in check_blend(np.zeros_like(datasets), samples, 2)
    assert "dataset number" in check_blend(datasets + 1, samples, 2)
    assert "shapes" in check_blend(datasets[:-1], samples, 2)


def test_a_file_that_another_training_writes_is_not_deleted(tmp_path: Path) -> None:
    """Two trainings start at once: the second one comes when the first has written half of its index."""
    file, content = tmp_path / "cache" / "x-order_index.npy", np.arange(1000)
    half, second_ended = threading.Event(), threading.Event()
    found: list[Any] = []

    def build() -> tuple[Any, ...]:
        if not file.exists():
            np.save(tmp_path / "whole.npy", content)
            data = (tmp_path / "whole.npy").read_bytes()
            with file.open("wb") as stream:
                stream.write(data[:500])
                stream.flush()
                half.set()
                second_ended.wait(0.3)
                stream.write(data[500:])
        return (np.load(file),)

    def train() -> None:
        found.append(replace_if_wrong(file.parent, "x-*_index.npy", build, lambda order: ""))

    def train_later() -> None:
        half.wait()
        train()

    first, second = threading.Thread(target=train), threading.Thread(target=train_later)
    first.start()
    second.start()
    second.join()
    second_ended.set()
    first.join()
    assert [deleted for _, deleted in found] == [{}, {}] and file.exists()
    assert all(np.array_equal(order, content) for (order,), _ in found)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def _zero(path: Path) -> None:
    array = np.load(path)
    np.save(path, np.zeros_like(array))


SPOIL: dict[str, Callable[[Path], object]] = {
    "zeroed": _zero,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 8),
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Evil())),
}


def _rebuilt(sample: Path) -> dict[str, tuple[bool, int, bool]]:
    """For each kind of damage to every cached file: same samples as before, number of warnings, whether code ran."""
    import logging

    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from torch import distributed

    from data.datasets import WholeMaskGPTDataset, check_blended_indices

    class _Tokenizer:
        eod = pad = 0
        unique_identifiers = {"class": "none"}

    def samples() -> list[list[int]]:
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=64,
            blend_per_split=[([str(sample / name / "train") for name in ("prose", "code")], [0.7, 0.3]), None, None],
            tokenizer=_Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            path_to_cache="cache",
        )
        check_blended_indices()
        train, _, _ = BlendedMegatronDatasetBuilder(WholeMaskGPTDataset, [50, 0, 0], lambda: True, config).build()
        return [train[number]["tokens"].tolist() for number in range(50)]

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("launch").addHandler(handler)
    before, found = samples(), {}
    assert samples() == before and not warnings
    for name, spoil in SPOIL.items():
        warnings.clear()
        for path in Path("cache").glob("*.npy"):
            spoil(path)
        found[name] = (samples() == before, len(warnings), Path("ran").exists())
    return found


@pytest.mark.nemo
def test_damaged_files_are_built_again(sample: Path, forked: Callable[..., Any]) -> None:
    """Without the check, zeroed files repeat samples in silence, cut ones are a traceback, and the pickle is run."""
    found = forked(_rebuilt, sample)
    assert {name: (same, ran) for name, (same, _, ran) in found.items()} == dict.fromkeys(SPOIL, (True, False))
    assert all(warnings >= 5 for _, warnings, _ in found.values()), found
