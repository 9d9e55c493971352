"""The environment sets as plain tables: variable -> (value, reason). common/environment/merge.py merges them.

BASE is part of every set. SETS are for kinds of machines and of communication, TIERS for development, rehearsal and
production. ONLY_IF names the parallelism without which a variable has no use. common/environment/known.py says what is
known of each variable, and why no set has certain ones that are recommended elsewhere.
"""

from __future__ import annotations

Table = dict[str, tuple[str, str]]

TIMEOUT_KEY = "CPT_PROCESS_GROUP_TIMEOUT_S"
BACKEND_KEY = "CPT_PROCESS_GROUP_BACKEND"

BASE: Table = {
    TIMEOUT_KEY: (
        "600",
        "s a collective waits for a lost rank before the run ends with its name; torch's own for NCCL",
    ),
    "WANDB_MODE": ("disabled", "this project logs to files and TensorBoard; nothing may stop for a login"),
}

_ALLOCATOR: Table = {
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True", "less fragmentation, fewer out-of-memory errors"),
}
_ONE_GPU: Table = {
    "CUDA_VISIBLE_DEVICES": ("0", "the first GPU, or one a rank; set it yourself to take another"),
    **_ALLOCATOR,
}
_THREADS: Table = {
    "OMP_NUM_THREADS": ("4", "torchrun's own 1 starves host work; every core in every rank oversubscribes"),
}
_CONNECTIONS = ("1", "launches a layer's communication before the GEMM it overlaps with (TP, CP)")
_GUIDE = "from VCCL's guide, not measured here"
_MARGIN = ("16", "leaves 16 SMs to the gradient reduction that overlaps the backward pass (DP)")

SETS: dict[str, Table] = {
    "official": {
        "TORCH_NCCL_AVOID_RECORD_STREAMS": ("1", "lower peak memory of collectives; torch's default since 2.8"),
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
        "GOMP_SPINCOUNT": ("3000", "threads wait awake a moment: asleep, a step on two cores takes 1.2 times as long"),
        "OMP_WAIT_POLICY": ("PASSIVE", "ranks that share cores: waiting awake makes them 2 to 5 times slower"),
    },
    "dual": {
        "CUDA_VISIBLE_DEVICES": ("0,1", "the first two GPUs, or one a rank; set it yourself to take others"),
        **_ALLOCATOR,
        **_THREADS,
        "TORCH_NCCL_AVOID_RECORD_STREAMS": ("1", "lower peak memory of collectives; torch's default since 2.8"),
        "CUDA_DEVICE_MAX_CONNECTIONS": _CONNECTIONS,
    },
    "multinode-ib": {
        **_ALLOCATOR,
        **_THREADS,
        "TORCH_NCCL_AVOID_RECORD_STREAMS": ("1", "lower peak memory of collectives; torch's default since 2.8"),
        "CUDA_DEVICE_MAX_CONNECTIONS": _CONNECTIONS,
        "NVTE_FWD_LAYERNORM_SM_MARGIN": _MARGIN,
        "NVTE_BWD_LAYERNORM_SM_MARGIN": _MARGIN,
        "NCCL_NVLS_ENABLE": ("0", "frees the memory of NVLink SHARP buffers; over InfiniBand the wire is the limit"),
        "NCCL_IB_TIMEOUT": ("22", "17 s a retry instead of 4: a flapping link stalls the run instead of ending it"),
        "NCCL_IB_QPS_PER_CONNECTION": ("2", "two queue pairs spread one ring over the paths of a routed fabric"),
        "NCCL_PXN_DISABLE": ("0", "PXN on (NCCL's default): a GPU may use its neighbour's nearer NIC over NVLink"),
    },
    "gloo": {
        BACKEND_KEY: (
            "gloo",
            "the recipe's process group on TCP: no NCCL, no distributed optimizer; a diagnostic",
        ),
    },
    "nccl-no-shm": {
        "NCCL_SHM_DISABLE": ("1", "NCCL without /dev/shm: ranks without a direct path go through the network stack"),
    },
    "memory": {
        "NCCL_CUMEM_ENABLE": ("1", f"{_GUIDE}; NCCL 2.19 and newer decides this by itself"),
        "NCCL_BUFFSIZE": ("8388608", f"{_GUIDE}; twice NCCL's own 4 MiB: takes more GPU memory, for large messages"),
        "NCCL_P2P_LEVEL": ("PIX", f"{_GUIDE}; GPUs that share no PCIe switch and no NVLink go through host memory"),
    },
    "network": {
        "NCCL_IB_TIMEOUT": ("22", f"{_GUIDE}; 17 s a retry instead of 4: a flapping link stalls the run"),
        "NCCL_IB_RETRY_CNT": ("7", f"{_GUIDE}; NCCL's own, and the maximum"),
        "NCCL_IB_AR_THRESHOLD": ("8192", f"{_GUIDE}; NCCL's own"),
        "NCCL_NET_GDR_LEVEL": ("PHB", f"{_GUIDE}; a NIC reaches GPU memory within one CPU socket"),
    },
    "overlap": {
        "NCCL_PASS_SM": ("1", f"{_GUIDE}; only VCCL reads it: join with vccl"),
        "NCCL_CUMEM_ENABLE": ("1", f"{_GUIDE}; cuMem buffers, which SM-free transfers register"),
        "CUDA_DEVICE_MAX_CONNECTIONS": _CONNECTIONS,
    },
    "vccl": {
        "NCCL_PASS_SM": ("1", "transfers without GPU kernels: what VCCL is for; pays with pipelines across nodes"),
        "NCCL_PSM_FORCE_ZEROCOPY": ("1", "no staging copies; VCCL asks for it beside NCCL_PASS_SM"),
        "NCCL_PXN_DISABLE": ("1", "VCCL's SM-free mode does not go through a neighbour's NIC"),
        "NCCL_CUMEM_ENABLE": ("1", "cuMem buffers, which zero-copy registers"),
        "NCCL_ENABLE_FAULT_TOLERANCE": ("0", "VCCL has none in SM-free mode; --env +vccl-ft has it without that mode"),
        "NCCL_TELEMETRY_ENABLE": ("0", "VCCL's flow telemetry does not see SM-free transfers"),
    },
    "vccl-ft": {
        "NCCL_PASS_SM": ("0", "fault tolerance and SM-free transfers exclude each other"),
        "NCCL_CUMEM_ENABLE": ("1", "as in VCCL's own examples; NCCL 2.19 and newer decides this by itself"),
        "NCCL_ENABLE_FAULT_TOLERANCE": ("1", "a failed NIC's traffic moves to another; needs your NCCL_IB_HCA"),
        "NCCL_RETRY_COUNT": ("7", "attempts on a NIC before its traffic moves"),
        "NCCL_TIMEOUT": ("18", "as the InfiniBand exponent: 1.1 s an attempt"),
        "NCCL_TELEMETRY_ENABLE": ("1", "flow telemetry, the three variables together or none"),
        "TELEMETRY_WINDOWSIZE": ("100", "transfers averaged in one line"),
        "NCCL_TELEMETRY_LOG_PATH": ("/tmp/vccl_telemetry", "a folder on each node"),
    },
}

TIERS: dict[str, Table] = {
    "dev": {
        "NCCL_DEBUG": ("INFO", "every transport and interface that NCCL chooses, in the log"),
        "NCCL_DEBUG_SUBSYS": ("INIT,ENV,NET", "not every collective: that would be gigabytes"),
        "TORCH_DISTRIBUTED_DEBUG": ("INFO", "torch says what it sets up; DETAIL would synchronise each collective"),
        "TORCH_CPP_LOG_LEVEL": ("INFO", "torch's C++ side, where process groups are made"),
        TIMEOUT_KEY: ("120", "s; a broken set-up ends with an error in two minutes"),
    },
    "staging": {
        "NCCL_DEBUG": ("WARN", "NCCL's own words on a failure, silence otherwise"),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": ("2000", "torch's flight recorder: the last 2000 collectives of each rank"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", "the flight recorder is written when a collective times out"),
        TIMEOUT_KEY: ("300", "s; a hang ends the rehearsal soon"),
    },
    "prod": {
        "NCCL_DEBUG": (
            "ERROR",
            "as VCCL's guide has it; NCCL knows no ERROR and prints nothing: torch's error quotes its last one",
        ),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": ("2000", "torch's flight recorder: the last 2000 collectives of each rank"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", "the flight recorder is written when a collective times out"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
            "3",
            "torch's default, pinned: a rank that hangs ends; a retry can start",
        ),
        TIMEOUT_KEY: (
            "1800",
            "s; room for slow shared storage while rank 0 builds an index or a checkpoint is read",
        ),
    },
}

PURPOSES: dict[str, str] = {
    "base": "part of every set",
    "official": "the documented single-GPU environment, unchanged",
    "lean": "one GPU: the variables of `official` that matter",
    "cpu": "recipes that run on the CPU",
    "dual": "two GPUs of one machine",
    "multinode-ib": "several machines on InfiniBand",
    "gloo": "where NCCL fails: everything over TCP",
    "nccl-no-shm": "where /dev/shm is broken",
    "memory": "VCCL's guide: NCCL's buffers",
    "network": "VCCL's guide: InfiniBand",
    "overlap": "VCCL's guide: communication beside computation; with `vccl`",
    "vccl": "VCCL instead of NCCL: SM-free transfers",
    "vccl-ft": "VCCL instead of NCCL: fault tolerance and telemetry",
    "dev": "tier: everything is logged, a lost rank is noticed after 2 minutes",
    "staging": "tier: NCCL's warnings, 5 minutes",
    "prod": "tier: NCCL is silent, 30 minutes",
}

# The parallelism without which a variable has no use; `official` sets all of its variables for every run.
ONLY_IF: dict[str, str] = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "TP > 1 or CP > 1",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "DP > 1",
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "DP > 1",
    "GOMP_SPINCOUNT": "one rank, and no OMP_WAIT_POLICY of yours",
    "OMP_WAIT_POLICY": "several ranks",
}
VERBATIM = frozenset({"official"})
