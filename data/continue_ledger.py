"""How a ledger goes on: at the start of a run, when it is resumed, and when its blend is changed on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import UserError
from data.ledger import Attempt, Corpus, Ledger, StageEntry, read_ledger
from data.manifest import load_manifest

OPTION = "--change-blend"


def start_ledger(
    corpora: Sequence[Corpus], stages: Sequence[StageEntry], *, seed: int, seq_length: int, global_batch_size: int
) -> Ledger:
    """The ledger of a run that has read nothing yet."""
    return Ledger(
        step=0,
        seed=seed,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        corpora=tuple(corpora),
        stages=tuple(stages),
        attempts=(Attempt(1, 0, {}),),
        read={},
    )


def resume_ledger(
    ledger: Ledger,
    corpora: Sequence[Corpus],
    stages: Sequence[StageEntry],
    *,
    attempt: int,
    change_blend: bool = False,
    has_budget: bool = False,
) -> Ledger:
    """The ledger of an attempt that continues from `ledger.step`, with the stages that the recipe has now.

    What lies behind `ledger.step` stays as it was. What lies ahead follows from `stages`: freely where they only go on
    differently, and after a change of the past only if `change_blend` says so, which is then recorded.

    Args:
        corpora: of the blend as it is now.
        stages: of the blend as it is now, laid out from step 0.
        attempt: the number of the new attempt at this run; in a fork, where it begins with 1 again, the ledger goes on
            counting after the attempts of the run that it was forked from.
        change_blend: read by `stages` from here on, whatever was read before.
        has_budget: a forgetting budget moves the replay share of `stages`; it goes on with the share decided last.

    Raises:
        UserError: the past was read with other shares, or a corpus has changed its name or its content.
    """
    corpora = merge_corpora(ledger.corpora, corpora)
    step = ledger.step
    before = [one for one in ledger.attempts if one.first < step]
    attempt = max([attempt, *(one.number + 1 for one in before)])
    attempts = (*before, Attempt(attempt, step, ledger.read))
    problem = find_difference(ledger, stages)
    if (ledger.budget is not None) != has_budget:
        problem = f"{'a' if has_budget else 'no'} forgetting budget from here on"
    if problem is None:
        ahead = tuple(replace(one, attempt=attempt) for one in stages if one.first >= step)
        past = tuple(one for one in ledger.stages if one.first < step)
        resumed = replace(ledger, corpora=corpora, attempts=attempts, stages=(*past, *ahead))
        return resumed if ledger.budget is None else _keep_share(resumed, ledger)
    if not change_blend:
        raise UserError(
            "this run was trained on another blend",
            expected=f"the shares of its token ledger up to step {step}",
            found=problem or "",
            do=f"{OPTION}, to train on the new blend from step {step} on (recorded), or the old blend",
        )
    now = [one for one in stages if one.first <= step][-1]
    change = f"{OPTION} at step {step} of attempt {attempt}"
    first = replace(now, first=step, attempt=attempt, change=change, begins=dict(ledger.read))
    ahead = tuple(replace(one, attempt=attempt) for one in stages if one.first > step)
    past = tuple(one for one in ledger.stages if one.first < step)
    changed = (*past, first, *ahead)
    return replace(ledger, corpora=corpora, attempts=attempts, stages=changed, budget=None)


def _keep_share(resumed: Ledger, before: Ledger) -> Ledger:
    """The resumed ledger with the share that the forgetting budget decided last, from the step that it decided."""
    assert before.budget is not None
    share = [one for one in before.stages if one.first < before.step][-1].replay_share
    stages = [replace(one, replay_share=share) if one.first >= before.step else one for one in resumed.stages]
    resumed = replace(resumed, stages=tuple(stages))
    if before.budget.first < before.step:
        return resumed
    return resumed.with_share(before.budget.share, before.budget.first, before.budget.decided)


def find_difference(ledger: Ledger, stages: Sequence[StageEntry]) -> str | None:
    """The first difference between what was read since the last change and what `stages` say; None if there is none."""
    if ledger.budget is not None:  # it moves the shares; the stages themselves are those of the blend
        planned = [replace(one, replay_share=0.0) for one in ledger.stages if one.decided is None]
        ledger, stages = replace(ledger, stages=tuple(planned)), [replace(one, replay_share=0.0) for one in stages]
    if (order := stages[0].order) != ledger.order:
        return f"the order of {order}, not that of {ledger.order}"
    start = max((one.first for one in ledger.stages if one.change), default=0)
    was = [one for one in ledger.stages if start <= one.first < ledger.step]
    current = [one for one in stages if one.first <= start][-1:]
    now = [replace(one, first=start) for one in current]
    now += [one for one in stages if start < one.first < ledger.step]
    for old, new in zip(was, now, strict=False):
        if old.first != new.first:
            return f"stage {new.name} from step {new.first}, not {old.name} from step {old.first}"
        if not old.same_shares(new):
            return f"stage {new.name} {_describe(new)}, not {old.name} {_describe(old)}, from step {old.first}"
    if len(was) != len(now):
        return f"{len(now)} stages up to step {ledger.step}, not {len(was)}"
    return None


def _describe(stage: StageEntry) -> str:
    shares = ", ".join(f"{name} {share:.4g}" for name, share in stage.within.items())
    return f"({shares}; replay share {stage.replay_share:.4g})"


def merge_corpora(before: Sequence[Corpus], now: Sequence[Corpus]) -> tuple[Corpus, ...]:
    """The corpora of the ledger with the new ones after them: a corpus is known by its name and its content.

    Raises:
        UserError: a name stands for another corpus than before, or a corpus comes back under another name.
    """
    by_name = {corpus.name: corpus for corpus in before}
    by_content = {corpus.content: corpus for corpus in before}
    added = []
    for corpus in now:
        known, same = by_name.get(corpus.name), by_content.get(corpus.content)
        if known is not None and known.content != corpus.content:
            raise UserError(
                f"{corpus.name} is another corpus than it was in this run",
                expected=f"the corpus of {known.folder}, as it was",
                found=f"other training tokens in {corpus.folder}",
                do="give the domain another name in the blend: what was read is counted by name",
            )
        if known is None and same is not None:
            raise UserError(
                f"{corpus.name} is the corpus that this run knows as {same.name}",
                expected=f"the name {same.name}, so that nothing of it is read twice",
                found=f"{corpus.name}, in {corpus.folder}",
                do=f"call the domain {same.name} in the blend",
            )
        if known is None:
            by_name[corpus.name] = by_content[corpus.content] = corpus
            added.append(corpus)
    return (*before, *added)


def make_ledger(
    stages: Sequence[StageEntry],
    corpora: Sequence[Corpus],
    *,
    saved: Path | None,
    has_budget: bool,
    attempt: int,
    seed: int,
    seq_length: int,
    global_batch_size: int,
) -> Ledger:
    """The ledger of an attempt whose stages the launcher has checked: a new one, or that of a checkpoint, continued.

    Args:
        stages: `data.stages`.
        corpora: of the blend as it is now.
        saved: ledger.json of the checkpoint that the run continues from.
        has_budget: a forgetting budget moves the replay share.
    """
    if saved is not None:
        before = read_ledger(saved)
        return resume_ledger(before, corpora, stages, attempt=attempt, change_blend=True, has_budget=has_budget)
    return start_ledger(corpora, stages, seed=seed, seq_length=seq_length, global_batch_size=global_batch_size)


def with_layouts(ledger: Ledger, layouts: Mapping[str, tuple[int, int]]) -> Ledger:
    """The ledger of a run in Megatron's order, which knows how that order was laid out.

    Args:
        layouts: corpus -> samples that Megatron was asked for, and samples that it has laid out.
    """
    corpora = [
        replace(corpus, laid_out=layouts[corpus.name][0], laid_out_size=layouts[corpus.name][1])
        if corpus.name in layouts
        else corpus
        for corpus in ledger.corpora
    ]
    return replace(ledger, corpora=tuple(corpora))


def make_corpora(
    folders: Mapping[str, str], roles: Mapping[str, str], stages: Sequence[StageEntry], seq_length: int
) -> list[Corpus]:
    """The corpora that the stages read, by their manifests.

    Args:
        folders: domain -> prepared folder.
        roles: domain -> role; a domain without one is new.
    """
    found = []
    for name, folder in folders.items():
        if any(name in stage.within for stage in stages):
            train = load_manifest(Path(folder)).splits["train"]
            windows = (train.tokens - 1) // seq_length
            found.append(Corpus(name, roles.get(name, "new"), folder, train.bin_sha256, windows))
    return found
