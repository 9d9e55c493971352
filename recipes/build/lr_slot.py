"""One NeMo learning-rate slot for every schedule of recipes/schedules.py."""

# NeMo-Run reads the constructor's types to parse overrides: no `from __future__ import annotations`, no `X | Y`

import logging
from dataclasses import asdict
from typing import Any, Optional, Union

from nemo.lightning.pytorch.optim.base import LRSchedulerModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.errors import UserError
from recipes.schedules import Schedule, build

log = logging.getLogger("launch")


class StepSchedule(LRSchedulerModule):
    """A schedule as a function of its own parameters, not of trainer.max_steps.

    NeMo's CosineAnnealingScheduler takes its length from trainer.max_steps at the start of a run and from
    the checkpoint afterwards: a run that is extended falls to the minimum lr at once (nemo_toolkit 2.3;
    tests/training/test_schedule_run.py shows it). Here optimizer step s (0 is the first) is always made with
    `build(kind, ...).lr(s)`, also after a restore.

    Args:
        kind: rewarm_cosine, wsd, infinite or polish; each takes some of the parameters below and refuses others.
        max_lr: the peak; None: the optimizer's `lr` (optim.config.lr), the one place where recipes state it.
        min_lr: the end of the decay.
        warmup_steps: steps of linear warm-up from `start_lr`.
        start_lr: 0 unless given.
        decay_end: step at which the cosine ends (rewarm_cosine, polish).
        fork_step: step at which the decay starts (wsd, infinite); None: it does not.
        decay_steps: length of that decay.
        decay_shape: "linear" or "1-sqrt" (wsd).
        constant_lr: lr between cooldown and annealing (infinite).
        cooldown_steps: steps from max_lr down to constant_lr (infinite).
    """

    def __init__(
        self,
        kind: str = "rewarm_cosine",
        max_lr: Optional[float] = None,
        min_lr: Optional[float] = None,
        warmup_steps: int = 0,
        start_lr: Optional[float] = None,
        decay_end: Optional[int] = None,
        fork_step: Optional[int] = None,
        decay_steps: Optional[int] = None,
        decay_shape: Optional[str] = None,
        constant_lr: Optional[float] = None,
        cooldown_steps: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.parameters: dict[str, Any] = {
            "max_lr": max_lr,
            "min_lr": min_lr,
            "warmup_steps": warmup_steps,
            "start_lr": start_lr,
            "decay_end": decay_end,
            "fork_step": fork_step,
            "decay_steps": decay_steps,
            "decay_shape": decay_shape,
            "constant_lr": constant_lr,
            "cooldown_steps": cooldown_steps,
        }
        self.max_steps: Optional[int] = None  # NeMo's strategy writes trainer.max_steps here; used for warnings alone

    def schedule(self, optimizer_lr: float) -> Schedule:
        """The schedule, with the optimizer's lr as its peak where none is given here."""
        given = self.parameters["max_lr"]
        return build(self.kind, **{**self.parameters, "max_lr": optimizer_lr if given is None else given})

    def scheduler(self, model: Any, optimizers: Optimizer) -> dict[str, Any]:
        groups = optimizers.param_groups
        schedule = self.schedule(groups[0].get("pre_mult_lr", groups[0]["lr"]) if groups else 1.0)
        for line in schedule.warnings(self.max_steps) if self.max_steps and self.max_steps > 0 else ():
            log.warning("learning rate: %s", line)
        applied = {"scheduler": ScheduleLR(optimizers, schedule), "interval": "step", "frequency": 1}
        return {"optimizer": optimizers, "lr_scheduler": applied, "monitor": "val_loss"}


class ScheduleLR(LRScheduler):
    """Writes `schedule.lr(s)` into every parameter group, times the group's own factor.

    Megatron-Core makes groups with `lr_mult` (scale_lr_cond) and, with decoupled_lr, another `max_lr` for
    embedding and output layer; NeMo folds lr_mult into the lr and leaves decoupled_lr unused. Both are
    kept here: a group's curve is the schedule, scaled to that group's peak.

    Raises:
        UserError: decoupled_min_lr is set, which a scaled curve cannot follow.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.schedule = schedule
        self.factors = [_factor(group, schedule.max_lr) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[Union[float, Tensor]]:
        return [self.schedule.lr(self.last_epoch) * factor for factor in self.factors]

    def state_dict(self) -> dict[str, Any]:
        """The position, and the schedule for comparison; a restore takes the position only."""
        described = {"kind": self.schedule.kind, **asdict(self.schedule)}
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, "schedule": described}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved step; the lr of that step comes from this run's schedule, not from the checkpoint."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict.get("_step_count", self.last_epoch + 1)
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr
        if "schedule" in state_dict:
            self._log_changes(build(**state_dict["schedule"]))

    def _log_changes(self, before: Schedule) -> None:
        step = self.last_epoch
        changed = next((s for s in range(step) if before.lr(s) != self.schedule.lr(s)), None)
        if changed is not None:
            log.warning("learning rate: another schedule than before the resume, already at step %d", changed)
        if before.lr(step) != self.schedule.lr(step):
            lrs = (before.lr(step), self.schedule.lr(step))
            log.warning("learning rate: step %d would have been %.4g, and is %.4g", step, *lrs)
        elif before != self.schedule and changed is None:
            log.info("learning rate: the schedule was changed after step %d; everything before it is the same", step)


def _factor(group: dict[str, Any], max_lr: float) -> float:
    """The group's peak as a multiple of the schedule's."""
    multiple = group.get("pre_lr_mult", group.get("lr_mult", 1.0))
    if not group.get("is_decoupled_lr"):
        return float(multiple)
    if group.get("min_lr") is not None:
        raise UserError(
            "optim.config.decoupled_min_lr (or min_lr) is set beside decoupled_lr",
            expected="decoupled_lr alone: those groups follow the schedule, scaled to that peak",
            found=f"minimum {group['min_lr']!r}",
            do="optim.config.decoupled_min_lr=None optim.config.min_lr=None",
        )
    return float(group["max_lr"] / max_lr * multiple)
