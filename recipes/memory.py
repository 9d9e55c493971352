"""How much GPU memory a run takes, computed before it starts, and the largest batch that fits into a share of it.

bytes = parameters x (2 weights + 4 gradients + 12 optimizer / data parallel): bf16, fp32 main gradients, Adam
      + tokens in flight x layers x 2 x (6 hidden + 2 kv + FFN x ffn) / tensor parallel: kept for the backward pass
      + tokens of a micro batch x vocabulary x LOGIT / tensor parallel: output layer and loss
      + VALIDATION_TOKENS x vocabulary x 2: the logits of a validation, which cannot use the memory of a CUDA graph
The constants are fitted to measured peaks (docs/measurements/gpu-memory.md); `python -m bench.memory` repeats this.
Pure Python: used before NeMo is imported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from common.errors import UserError, unknown_name
from common.quantities import GIB
from recipes.plan import Plan
from training.fast.sizes import VALIDATION_TOKENS

# activations that a layer keeps for the backward pass: bf16 numbers per token, as multiples of the hidden size
HIDDEN_EVERY_RANK = 4.0  # both norms' inputs and outputs, which tensor parallelism alone does not split
HIDDEN_SPLIT = 2.0  # queries and attention's output; keys and values are added by the number of their groups
# times the FFN size: SwiGLU's result is computed again, kept, or kept with what three kernels pass to each other
FFN = {"quack": 2.0, "fast": 3.0, "plain": 4.0, "sdpa": 3.0}
LOGIT = {"quack": 2.0, "fast": 2.0, "plain": 10.0, "sdpa": 2.0}  # bytes: bf16 once, or with fp32 copy and gradient
MEMORY_LEVERS = (
    "speed.fused_lm_head",
    "model.config.bias_activation_fusion",
)  # the speed levers that these numbers assume
OUTSIDE_GIB = 1.5  # of a GPU's memory, outside torch's allocator: CUDA context, cuBLAS workspace, NCCL buffers
FRAGMENTS = 1.04  # reserved by the allocator / allocated, with expandable segments

PROFILES = {"conservative": 0.48, "balanced": 0.65, "aggressive": 0.90}  # shares of a GPU's memory
TOKENS_PER_STEP = {"conservative": 131_072, "balanced": 262_144, "aggressive": 524_288}
LARGEST_MICRO_BATCH = 32  # samples; larger ones were never measured
ESTIMATE_ERROR = 0.05  # the measured peaks are within this share of the estimate (docs/measurements/gpu-memory.md)
DEFAULT_SHARE = 0.85  # of a GPU's memory without a profile: leaves room for the estimate's error
ADVISED_BYTES = 20e9  # free memory of a GPU for Qwen2.5-0.5B, activations included
ASSUMED_GPU_GIB = 80.0  # where no GPU can be asked

Path = Literal["quack", "fast", "plain", "sdpa"]


@dataclass(frozen=True)
class Estimate:
    """Peak bytes on the fullest rank (the first pipeline stage, or the last, whichever is more)."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    validation: float

    @property
    def allocated_gib(self) -> float:
        """All tensors at the peak; a CUDA graph's too, which torch.cuda.max_memory_allocated leaves out."""
        kept = self.weights + self.gradients + self.optimizer + self.activations
        return (kept + self.logits + self.validation) / GIB

    @property
    def reserved_gib(self) -> float:
        """What torch.cuda.max_memory_reserved reports."""
        return self.allocated_gib * FRAGMENTS

    @property
    def gpu_gib(self) -> float:
        """What nvidia-smi reports as used."""
        return self.reserved_gib + OUTSIDE_GIB

    def __str__(self) -> str:
        parts = ", ".join(f"{f.name} {getattr(self, f.name) / GIB:.2f}" for f in dataclasses.fields(self))
        return f"{self.allocated_gib:.2f} GiB ({parts}), {self.gpu_gib:.1f} as nvidia-smi counts"


def estimate(plan: Plan, path: Path = "fast") -> Estimate:
    """Peak memory of a bf16 run.

    Args:
        plan: resolved; with `path` sdpa the distributed optimizer is off in any case (recipes/build/adapt.py).
        path: fast is Transformer Engine with the levers of recipes/build/levers.py, quack the same with
            `speed.fused_mlp`, plain without levers, sdpa the levers without TE.
    """
    stages = [_stage(plan, path, stage) for stage in range(plan.pipeline_parallel)]
    return max(stages, key=lambda stage: stage.allocated_gib)


def _stage(plan: Plan, path: Path, stage: int) -> Estimate:
    shape, tp, pp = plan.shape, plan.tensor_parallel, plan.pipeline_parallel
    last = stage == pp - 1
    embedding = shape.vocab_size * shape.hidden_size
    layers = shape.num_layers / pp
    body = (shape.num_parameters - embedding * (1 if shape.tied else 2)) / pp
    ends = (stage == 0) + (last if pp > 1 or not shape.tied else 0)  # with one stage a tied embedding is there once
    parameters = (body + embedding * ends) / tp
    shared_by = 1 if path == "sdpa" else plan.optimizer_shards
    every = HIDDEN_EVERY_RANK * shape.hidden_size / (tp if plan.sequence_parallel else 1)
    kv = shape.hidden_size * shape.num_query_groups / shape.num_attention_heads
    split = HIDDEN_SPLIT * shape.hidden_size + 2 * kv + FFN[path] * shape.ffn_hidden_size
    kept = 2 * (every + split / tp)
    tokens = plan.micro_batch_size * plan.seq_length / max(1, plan.context_parallel)
    has_graph = path != "plain" and tp == pp == plan.context_parallel == 1
    vp = plan.virtual_pipeline or 1  # a stage begins its later chunks before the first ones return
    chunks = 2 * (pp - stage - 1) + (vp - 1) * pp + 1 if vp > 1 else pp - stage
    in_flight = min(chunks / vp, max(1, plan.num_micro_batches))
    return Estimate(
        weights=2 * parameters,
        gradients=4 * parameters,
        optimizer=12 * parameters / shared_by,
        activations=tokens * layers * kept * in_flight,
        logits=tokens * shape.vocab_size * LOGIT[path] / tp if last else 0.0,
        validation=2.0 * VALIDATION_TOKENS * shape.vocab_size if has_graph else 0.0,
    )


def cpu_state_bytes(plan: Plan) -> float:
    """What a rank on a CPU holds at any batch size: fp32 weights, gradients and two moments of Adam."""
    return 16.0 * plan.shape.num_parameters / max(1, plan.tensor_parallel * plan.pipeline_parallel)


def share_of(profile: str) -> float:
    """The share of a GPU's memory that a memory profile takes, in 0..1.

    Raises:
        UserError: there is no such profile.
    """
    if profile not in PROFILES:
        usual = "--memory-profile balanced"
        raise unknown_name("memory profile", profile, PROFILES, usual, typed="--memory-profile {}")
    return PROFILES[profile]


def fit(plan: Plan, profile: str, gpu_gib: float, path: Path = "fast") -> tuple[Plan, list[str]]:
    """The plan with the batch of `profile` on a GPU of this size.

    The longest sequence up to the plan's that fits with one sample, then the largest micro batch; the global batch is
    the multiple of it (times the replicas) nearest to the profile's tokens per step.

    Returns:
        the plan, and one line per choice with its reason.

    Raises:
        UserError: an unknown profile, or a GPU on which one sample of 512 tokens does not fit.
    """
    room = share_of(profile) * gpu_gib
    sized = [
        _sized(plan, profile, n, seq) for seq in _lengths(plan.seq_length) for n in range(LARGEST_MICRO_BATCH, 0, -1)
    ]
    fitting = [one for one in sized if estimate(one, path).gpu_gib <= room]
    if not fitting:
        least = estimate(dataclasses.replace(plan, micro_batch_size=1, seq_length=512), path)
        raise UserError(
            f"the model does not fit into {PROFILES[profile]:.0%} of this GPU",
            expected=f"{room:.1f} GiB or less ({PROFILES[profile]:.0%} of {gpu_gib:.0f} GiB)",
            found=str(least) + " with one sample of 512 tokens",
            do="a profile with a larger share, or trainer.strategy.tensor_model_parallel_size=2",
        )
    best = fitting[0]
    return best, _reasons(best, profile, gpu_gib, path)


def largest_micro_batch(plan: Plan, gpu_gib: float, path: Path = "fast") -> int:
    """The largest micro batch that keeps the global batch and fits into `DEFAULT_SHARE` of a GPU; at least 1."""
    return largest_that_fits(plan, DEFAULT_SHARE * gpu_gib, path) or 1


def largest_that_fits(plan: Plan, gib: float, path: Path = "fast") -> int | None:
    """The largest micro batch that keeps the global batch and needs at most `gib` of each GPU; None if none does."""
    for size in micro_batches(plan, LARGEST_MICRO_BATCH):
        if estimate(dataclasses.replace(plan, micro_batch_size=size), path).gpu_gib <= gib:
            return size
    return None


def half_micro_batch(plan: Plan) -> int | None:
    """The largest micro batch of at most half the present one that keeps the global batch; None if there is none."""
    return next(iter(micro_batches(plan, plan.micro_batch_size // 2)), None)


def micro_batches(plan: Plan, most: int) -> list[int]:
    """Every micro batch of at most `most` samples that keeps the global batch, the largest first."""
    share = plan.global_batch_size // max(1, plan.data_parallel)
    rounds = plan.pipeline_parallel if plan.virtual_pipeline else 1  # virtual stages take micro batches in such rounds
    sizes = range(min(most, share), 0, -1)
    return [size for size in sizes if share % size == 0 and share // size % rounds == 0]


def _lengths(most: int) -> list[int]:
    return [length for length in (most, 1024, 512) if length <= most]


def _sized(plan: Plan, profile: str, micro_batch: int, seq_length: int) -> Plan:
    once = micro_batch * max(1, plan.data_parallel)  # samples that all replicas process at once
    samples = max(1, round(TOKENS_PER_STEP[profile] / seq_length / once)) * once
    return dataclasses.replace(
        plan,
        seq_length=seq_length,
        model_seq_length=seq_length,
        micro_batch_size=micro_batch,
        global_batch_size=samples,
    )


def _reasons(plan: Plan, profile: str, gpu_gib: float, path: Path) -> list[str]:
    found, share = estimate(plan, path), PROFILES[profile]
    room = f"{share:.0%} of {gpu_gib:.0f} GiB"
    return [
        f"profile {profile}: {room} = {share * gpu_gib:.1f} GiB; estimated {found}",
        f"data.seq_length={plan.seq_length} tokens: the longest that fits with one sample",
        f"data.micro_batch_size={plan.micro_batch_size} samples: "
        + ("the largest that was measured" if plan.micro_batch_size == LARGEST_MICRO_BATCH else "the most that fits"),
        f"data.global_batch_size={plan.global_batch_size} samples = {plan.tokens_per_step:,} tokens per step: the"
        f" multiple of {plan.micro_batch_size} x {plan.data_parallel} nearest to {TOKENS_PER_STEP[profile]:,}",
    ]
