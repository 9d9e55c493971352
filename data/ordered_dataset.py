"""The training samples of a run in the order of its token ledger, over the same memory-mapped .bin and .idx files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset

from common.errors import UserError
from data.ledger import Corpus, Ledger
from data.sample_order import permute_range, samples_of_steps

_LAID_OUT = 4096  # samples whose places are computed at once


class OrderedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Sample i of the run, for any i: which corpus, which of its windows.

    Data workers and ranks need nothing of each other: a sample is a function of the ledger and of its number. The rows
    of some steps are computed together and kept until a step outside them is asked for, or the replay share changes.

    Args:
        ledger: what was read, and the stages.
        build: (corpus, samples or None for one reading) -> its windows, in Megatron's shuffled order.
        num_samples: of the whole run.
        most_changes: how often the replay share can change while the run trains.
    """

    def __init__(
        self,
        ledger: Ledger,
        build: Callable[[Corpus, int | None], GPTDataset],
        num_samples: int,
        most_changes: int = 0,
    ) -> None:
        self.ledger, self.segments, self.num_samples = ledger, ledger.segments(), num_samples
        read = {name for stage in ledger.stages_ahead for name in stage.within}
        self._windows: dict[int, GPTDataset] = {}  # by the corpus's number in the ledger
        self._laid_out: dict[int, GPTDataset] = {}
        for number, corpus in enumerate(ledger.corpora):
            if corpus.name not in read:  # of an earlier blend
                continue
            self._windows[number] = build(corpus, None)
            check_size(corpus, corpus.windows, self._windows[number])
            if ledger.read.get(corpus.name, 0) < corpus.laid_out_size:
                self._laid_out[number] = build(corpus, corpus.laid_out)
                check_size(corpus, corpus.laid_out_size, self._laid_out[number])
        # share, first step and deciding step of each change, and their number: in memory shared with the data workers
        self._changes = torch.zeros(most_changes, 3, dtype=torch.float64).share_memory_()
        self._num_changes = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._changes_made = 0  # by this process
        # corpus -> the windows of its first pass (None: nothing of it is left to read), and those of the later ones
        self._passes: dict[int, tuple[Any, GPTDataset]] = {
            number: (self._laid_out.get(number) if ledger.corpora[number].laid_out_size else one, one)
            for number, one in self._windows.items()
        }
        self._batch = ledger.global_batch_size
        self._step, self._first_index = -1, 0
        self._rows: list[tuple[int, int, int]] = []

    @property
    def datasets(self) -> list[GPTDataset]:
        """The corpora that are read from here on, one reading of each."""
        return list(self._windows.values())

    def __len__(self) -> int:
        return self.num_samples

    def change_share(self, share: float, first: int, decided: int) -> None:
        """Let every process read another replay share from step `first` on, none of whose samples it was asked for yet.

        A data worker sees the change before it is asked for such a sample, because the request comes after it.
        """
        row = int(self._num_changes)
        self._changes[row] = torch.tensor([share, first, decided], dtype=torch.float64)
        self._num_changes += 1

    def _make_changes(self) -> None:
        """Make the changes of the replay share that were decided since this process last looked."""
        for share, first, decided in self._changes[self._changes_made : int(self._num_changes)].tolist():
            self.ledger = self.ledger.with_share(share, int(first), int(decided))
            self._changes_made += 1
        self.segments, self._rows = self.ledger.segments(), []

    def __getitem__(self, index: int) -> dict[str, Any]:
        step = index // self._batch
        if step != self._step:
            self._go_to(step)
        domain, pass_number, window = self._rows[index - self._first_index]
        first, later = self._passes[domain]
        return {"dataset_id": domain, **(later if pass_number else first)[window]}

    def rows_of_step(self, step: int) -> list[tuple[int, int, int]]:
        """(corpus, pass, window) of each sample of a global batch; windows as the corpus's dataset counts them."""
        self._go_to(step)
        first = step * self._batch - self._first_index
        return self._rows[first : first + self._batch]

    def _go_to(self, step: int) -> None:
        """Compute the rows from this step on, unless they are there, with the changes decided since the last step."""
        if int(self._num_changes) > self._changes_made:
            self._make_changes()
        if not 0 <= step * self._batch - self._first_index < len(self._rows):
            self._rows, self._first_index = self._lay_out(step), step * self._batch
        self._step = step

    def _lay_out(self, step: int) -> list[tuple[int, int, int]]:
        """(corpus, pass, window) of each sample from this step on."""
        most = max(1, _LAID_OUT // self._batch)
        domains, numbers = samples_of_steps(self.segments, step, self._batch, most)
        passes, windows = numpy.zeros_like(numbers), numpy.zeros_like(numbers)
        for domain, corpus in enumerate(self.ledger.corpora):
            own = domains == domain
            if own.any():  # they follow each other: the first one and their number name them all
                first, count = int(numbers[own][0]), int(own.sum())
                passes[own], windows[own] = find_windows(self.ledger, corpus, first, count)
        return list(zip(domains.tolist(), passes.tolist(), windows.tolist(), strict=True))


def find_windows(ledger: Ledger, corpus: Corpus, first: int, count: int) -> tuple[Any, Any]:
    """int64[count] each: pass and window of the corpus's samples from `first` on, as its dataset counts windows."""
    passes, windows = [], []
    while count:
        number, place = corpus.locate(first)
        length = min(count, corpus.size_of(number) - place)
        passes.append(numpy.full(length, number))
        if number == 0:  # Megatron has shuffled it
            windows.append(numpy.arange(place, place + length))
        else:
            windows.append(permute_range(place, place + length, corpus.windows, ledger.key(corpus, number)))
        first, count = first + length, count - length
    return numpy.concatenate(passes), numpy.concatenate(windows)


def check_size(corpus: Corpus, expected: int, dataset: GPTDataset) -> None:
    """What the ledger counts with is what Megatron has built.

    Raises:
        UserError: it is not.
    """
    if len(dataset) != expected:
        raise UserError(
            f"{corpus.name} has another number of samples than its ledger counts with",
            expected=f"{expected:,} samples",
            found=f"{len(dataset):,} in {corpus.folder}",
            do="bring back the corpus as it was, or start a new run with --name",
        )
