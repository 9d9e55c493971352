"""Environment sets: plain tables with a reason for each key, applied before torch is imported.

What the user's shell already sets wins, and is named. docs/03-environment.md has the verdicts.
"""

from __future__ import annotations

import difflib
from collections.abc import MutableMapping
from dataclasses import dataclass

from runtime.errors import UserError

Table = dict[str, tuple[str, str]]

_ONE_GPU: Table = {
    "CUDA_VISIBLE_DEVICES": ("0", "one process sees one GPU; set it yourself to take another"),
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True", "less fragmentation, fewer out-of-memory errors"),
}

SETS: dict[str, Table] = {
    "official": {
        "TORCH_NCCL_AVOID_RECORD_STREAMS": ("1", "lower peak memory of collectives; no effect with one rank"),
        "NCCL_NVLS_ENABLE": ("0", "no NVLink SHARP buffers; no effect with one rank"),
        "NVTE_DP_AMAX_REDUCE_INTERVAL": ("0", "FP8 only, unused since Transformer Engine 2.0; kept as documented"),
        "NVTE_ASYNC_AMAX_REDUCTION": ("1", "FP8 only, unused since Transformer Engine 2.0; kept as documented"),
        "CUDA_VISIBLE_DEVICES": _ONE_GPU["CUDA_VISIBLE_DEVICES"],
        "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "orders kernels for tensor parallelism; on one GPU it can cost speed"),
        "PYTORCH_CUDA_ALLOC_CONF": _ONE_GPU["PYTORCH_CUDA_ALLOC_CONF"],
        "NVTE_FWD_LAYERNORM_SM_MARGIN": ("16", "leaves 16 SMs to communication; on one GPU it can cost speed"),
        "NVTE_BWD_LAYERNORM_SM_MARGIN": ("16", "leaves 16 SMs to communication; on one GPU it can cost speed"),
    },
    "lean": dict(_ONE_GPU),
    "cpu": {
        "CUDA_VISIBLE_DEVICES": ("", "this recipe runs on the CPU, also where there is a GPU"),
        "TORCHDYNAMO_DISABLE": ("1", "a cold torch.compile cache costs 30 s and needs a C++ compiler"),
        "OMP_WAIT_POLICY": ("PASSIVE", "spinning threads make shared cores 5 to 10 times slower"),
    },
}


@dataclass(frozen=True)
class Setting:
    """One applied variable: who set it (`set` of that name, or `user`) and why."""

    key: str
    value: str
    source: str
    reason: str


def apply(name: str, environ: MutableMapping[str, str]) -> list[Setting]:
    """Put set `name` into `environ`; keys that are there already stay as they are.

    Raises:
        UserError: no such set.
    """
    if name not in SETS:
        near = difflib.get_close_matches(name, SETS, n=1, cutoff=0.3)
        raise UserError(
            f"unknown environment set {name!r}",
            expected="one of " + ", ".join(SETS),
            found=repr(name),
            do=f"did you mean --env {near[0]}?" if near else "leave --env out to take the recipe's own",
        )
    applied = []
    for key, (value, reason) in SETS[name].items():
        source = "user" if key in environ else name
        environ.setdefault(key, value)
        applied.append(Setting(key, environ[key], source, reason))
    return applied
