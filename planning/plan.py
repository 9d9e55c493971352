"""What a run will be: parameters, tokens, memory, disk, time, energy, learning rate and warnings, before it starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ProjectError, UserError
from common.rundir import RunDir
from data.blend import Blend, parse_blend, read_yaml
from data.manifest import load_manifest
from launcher import batch_size, executor_table
from launcher.earlier_runs import highest_rate
from launcher.executors.on_cluster import check_size
from launcher.load_cluster import load_cluster
from launcher.preflight import check as preflight
from launcher.preflight.findings import Finding
from launcher.preflight.ranks import check_fp8
from launcher.preflight.room import RankGpu, advise_room
from planning.calibrate import Calibration, calibrate, read_calibration
from planning.cost import Cost, estimate_cost, implementation_of
from planning.hardware import Hardware, find_hardware
from recipes import memory
from recipes.advice import Advice, Facts, advise
from recipes.plan import Plan
from recipes.resolve import Resolved, resolve
from recipes.stages import resolve_plan_stages

if TYPE_CHECKING:
    from launcher.cluster_file import Cluster
    from planning.request import PlanRequest

WHOLE_RUN = "whole run"  # the one stage of a blend that does not change


@dataclass(frozen=True)
class DomainTokens:
    """What a stage of the run reads of one domain.

    Args:
        stage: name of the stage; `WHOLE_RUN` where the blend does not change.
        role: "new", "replay", "watch", or "" for a run without a blend.
        tokens: planned training tokens; None where the shares follow from corpora that are not prepared yet.
        epochs: readings of the corpus; None where it is not prepared yet.
    """

    stage: str
    name: str
    role: str
    folder: str
    tokens: int | None
    epochs: float | None


@dataclass(frozen=True)
class RunPlan:
    """Everything that `plan` shows of a run.

    Args:
        changed: overrides that the launcher would choose for this GPU.
        domains: what is read; watched domains have no tokens.
        data_problem: why tokens or epochs are not known, "" if they are.
        peak: memory of the fullest GPU by part; None on a CPU.
        measured_memory_gib: the peak that a calibration measured (its allocator's, without what lies outside).
        most_micro_batch: the largest that fits; None where none does, or on a CPU.
        free_disk: bytes free where the run would be written.
        problems: why the run would be refused, or what to look at.
    """

    resolved: Resolved
    hardware: Hardware
    executor: str
    changed: tuple[str, ...]
    domains: tuple[DomainTokens, ...]
    data_problem: str
    peak: memory.Estimate | None
    measured_memory_gib: float | None
    most_micro_batch: int | None
    room_advice: str
    free_disk: int
    cost: Cost
    problems: tuple[Finding, ...] = ()
    warnings: tuple[Advice, ...] = ()
    schedule_warnings: tuple[str, ...] = field(default=())

    @property
    def plan(self) -> Plan:
        return self.resolved.plan

    @property
    def fits(self) -> bool | None:
        """The estimated peak is within the GPU's memory; None on a CPU."""
        if self.peak_gib is None or self.hardware.card is None:
            return None
        return self.peak_gib <= self.hardware.card.memory_gib

    @property
    def peak_gib(self) -> float | None:
        """Memory of the fullest GPU as nvidia-smi counts it, measured if it was; None on a CPU."""
        if self.peak is None:
            return None
        measured = self.measured_memory_gib
        return self.peak.gpu_gib if measured is None else measured + memory.OUTSIDE_GIB


def make_plan(request: PlanRequest) -> RunPlan:
    """Compute the plan of a run; with `request.calibrate` train 20 steps of it first.

    Raises:
        ProjectError: what `train` would refuse before it looks at data and machine.
    """
    resolved = resolve(request.spec())
    executor, cluster = _executor(resolved)
    trains_here = executor != "" and executor_table.trains_here(executor, cluster)
    check_size(cluster, resolved.plan.num_nodes, resolved.plan.devices, executor)
    resolved = resolved.with_spec(executor=executor or None, elsewhere=not trains_here)
    hardware = find_hardware(resolved.plan, request, cluster, trains_here)
    fitted = _fit(resolved, hardware)
    changed = tuple(map(str, fitted.overrides[len(resolved.overrides) :]))
    calibration = _calibration(resolved, fitted, hardware, request)
    domains, problem, validation_tokens = _domains(fitted.plan)
    gpu = _rank_gpu(fitted, hardware)
    parent = next(
        p for p in (Path(fitted.spec.runs).absolute(), *Path(fitted.spec.runs).absolute().parents) if p.exists()
    )
    return RunPlan(
        resolved=fitted,
        hardware=hardware,
        executor=executor,
        changed=changed,
        domains=domains,
        data_problem=problem,
        peak=memory.estimate(fitted.plan, gpu.path) if gpu else None,
        measured_memory_gib=calibration.memory_gib if calibration else None,
        most_micro_batch=memory.largest_that_fits(fitted.plan, gpu.gib, gpu.path) if gpu else None,
        room_advice=advise_room(fitted.plan, gpu) if gpu else "",
        free_disk=shutil.disk_usage(parent).free,
        cost=estimate_cost(fitted, hardware, calibration, validation_tokens),
        problems=(
            *preflight.find(fitted.plan, RunDir("plan", parent), machine=False, data=False, gpu=gpu),
            *_fp8_problems(fitted.plan, hardware, request),
        ),
        warnings=tuple(advise(_facts(fitted, domains))),
        schedule_warnings=tuple(fitted.plan.learning_rate().warnings(fitted.plan.max_steps)),
    )


def _executor(resolved: Resolved) -> tuple[str, Cluster | None]:
    """The executor that `train` would take ("" where several nodes need one to be named), and its cluster file."""
    plan = resolved.plan
    usual = "direct" if plan.world_size == 1 else "local" if plan.num_nodes == 1 else ""
    executor = resolved.spec.executor or usual
    if executor:
        executor_table.check(executor, resolved.spec.cluster)
    return executor, load_cluster(resolved.spec.cluster) if resolved.spec.cluster is not None else None


def _fit(resolved: Resolved, hardware: Hardware) -> Resolved:
    """The batch that the launcher would choose for this GPU."""
    gpus = None if hardware.card is None else batch_size.Gpus(hardware.card.memory_gib, hardware.path)
    return batch_size.fit(resolved, RunDir("plan"), gpus)


def _rank_gpu(resolved: Resolved, hardware: Hardware) -> RankGpu | None:
    if hardware.card is None:
        return None
    return RankGpu(hardware.card.memory_gib, implementation_of(resolved, hardware))


def _fp8_problems(plan: Plan, hardware: Hardware, request: PlanRequest) -> list[Finding]:
    """Why FP8 cannot be used on this machine's GPU, or on the one that --gpu names (as if all it needs were there)."""
    if hardware.is_here:
        return list(check_fp8(plan, hardware.path if hardware.card else None))
    if request.gpu is None or hardware.card is None:
        return []
    return list(check_fp8(plan, "quack" if batch_size.are_hopper([hardware.card.name]) else "fast"))


def _calibration(resolved: Resolved, fitted: Resolved, hardware: Hardware, request: PlanRequest) -> Calibration | None:
    """The measurement that was asked for, or the one that is kept from an earlier call."""
    if not request.calibrate:
        return read_calibration(fitted, hardware)
    if not hardware.is_here:
        raise UserError(
            "--calibrate measures this machine",
            expected="a run that trains here" + (", with a GPU" if hardware.card else ""),
            found=f"executor {resolved.spec.executor}, {hardware.source}",
            do="run it on the machine that trains, or leave --calibrate out",
        )
    return calibrate(fitted, hardware)


def _domains(plan: Plan) -> tuple[tuple[DomainTokens, ...], str, float]:
    """What the run reads of each domain, why that is not known, and the tokens of one validation."""
    total, most = plan.max_steps * plan.tokens_per_step, plan.limit_val_batches * plan.tokens_per_step
    if plan.blend is None:
        return _one_corpus(plan, total, most)
    try:
        resolved = resolve_plan_stages(plan)
    except ProjectError as problem:
        return _planned_shares(plan, total, problem, most)
    trained, folders = resolved.blend, resolved.folders
    rows = [
        DomainTokens(
            stage.name if resolved.has_stages else WHOLE_RUN,
            *(d.name, d.role, str(d.folder), stage.tokens[d.name], stage.tokens[d.name] / d.tokens_available),
        )
        for stage in resolved.stages
        for d in trained.domains
        if d.name in stage.tokens
    ]
    rows += [DomainTokens(WHOLE_RUN, d.name, d.role, str(d.folder), 0, 0.0) for d in trained.validated_only]
    held = [load_manifest(Path(folder)).splits["validation"].tokens for folder in folders.values()]
    return tuple(rows), "", float(sum(min(most, tokens) for tokens in held))


def _one_corpus(plan: Plan, total: int, most: int) -> tuple[tuple[DomainTokens, ...], str, float]:
    folder = plan.data or ""
    try:
        splits = load_manifest(Path(folder)).splits
    except ProjectError as problem:
        row = DomainTokens(WHOLE_RUN, Path(folder).name or "?", "", folder, total, None)
        return (row,), f"{problem.what}: {problem.do}", float(most)
    available = splits["train"].tokens
    row = DomainTokens(WHOLE_RUN, Path(folder).name, "", folder, total, total / available if available else None)
    return (row,), "", float(min(most, splits["validation"].tokens))


def _planned_shares(
    plan: Plan, total: int, problem: ProjectError, most: int
) -> tuple[tuple[DomainTokens, ...], str, float]:
    """Without the corpora: the tokens of each role, which are exact where a role has one domain."""
    blend: Blend = parse_blend(read_yaml(Path(plan.blend)) if isinstance(plan.blend, str) else plan.blend)
    replay = blend.replay_share if plan.replay_share is None else plan.replay_share
    shares = {"new": 1 - replay, "replay": replay, "watch": 0.0}
    rows = []
    for domain in blend.domains:
        group = [one for one in blend.domains if one.role == domain.role]
        weights = [one.weight for one in group]
        known = len(group) == 1 or None not in weights
        part = 1.0 if len(group) == 1 else (domain.weight or 0.0) / (sum(w or 0.0 for w in weights) or 1.0)
        known = (known or not shares[domain.role]) and not blend.stages
        tokens = round(total * shares[domain.role] * part) if known or domain.role == "watch" else None
        rows.append(DomainTokens(WHOLE_RUN, domain.name, domain.role, str(domain.folder), tokens, None))
    return tuple(rows), f"{problem.what}: {problem.do}", float(most * len(rows))


def _facts(resolved: Resolved, domains: tuple[DomainTokens, ...]) -> Facts:
    """What the warnings rest on."""
    plan = resolved.plan
    new = [row for row in domains if row.role == "new"]
    held = {row.name: row.tokens / row.epochs for row in new if row.epochs and row.tokens}
    epochs: dict[str, float] = {}
    for row in domains:
        epochs[row.name] = epochs.get(row.name, 0.0) + (row.epochs or 0.0)
    trained = sum(row.tokens or 0 for row in domains)
    replayed = sum(row.tokens or 0 for row in domains if row.role == "replay")
    return Facts(
        base=plan.base,
        num_parameters=plan.shape.num_parameters,
        new_tokens=sum(held.values()) if new and held.keys() == {row.name for row in new} else None,
        replay_share=replayed / trained if trained else None,
        epochs={name: count for name, count in epochs.items() if count},
        max_lr=plan.max_lr,
        tried_lr=highest_rate(None, plan.base, Path(resolved.spec.runs)) if plan.base else None,
    )
