"""What is known of every variable that guides for training name: since when, what it does, and what to think of it.

Versions are NCCL's where the name begins with NCCL_, from "Environment Variables" of its user guide (2.30) at
docs.nvidia.com; `never` was found neither on that page nor in the sources of VCCL's main branch.
The sets say why they set a variable; this table is about the variable itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.environment.sets import BASE, SETS, TIERS

# variable: (since when, what it does and what to think of it)
KNOWN: dict[str, tuple[str, str]] = {
    # started processes
    "MASTER_ADDR": ("", "the executor sets it; by hand only for ranks that you start yourself"),
    "MASTER_PORT": ("", "the executor finds a free one; a fixed one can be taken"),
    "WORLD_SIZE": ("", "the executor sets it; left over in a shell it makes one process wait for others"),
    "RANK": ("", "the executor sets it, as LOCAL_RANK"),
    "LOCAL_RANK": ("", "the executor sets it, as RANK"),
    "OMPI_COMM_WORLD_RANK": ("", "mpirun's rank; --executor mpirun maps it"),
    "USE_LIBUV": (
        "torch 2.3",
        "0 cures torch builds without libuv (Windows); on Linux it only takes the slower store",
    ),
    "TORCHELASTIC_USE_AGENT_STORE": (
        "torch 1.9",
        "torchrun sets it in its ranks; True by hand leaves rank 0 waiting for a store",
    ),
    "ACCELERATE_USE_GLOO": ("never", "not a variable of Accelerate, which does not read it; here: --env +gloo"),
    # NCCL: which transport
    "NCCL_P2P_DISABLE": (
        "",
        "`doctor` tries 1: staging through host memory costs most of the bandwidth",
    ),
    "NCCL_P2P_LEVEL": (
        "2.3.4",
        "how far apart two GPUs may be to read each other's memory: NVL, PIX, PXB, PHB, SYS; NCCL chooses by itself",
    ),
    "NCCL_SHM_DISABLE": ("", "1: ranks without a direct path use the network instead of /dev/shm"),
    "NCCL_NET_GDR_LEVEL": (
        "2.3.4",
        "how far a NIC may be from a GPU to access its memory; NCCL reads the PCIe topology; measure before you set it",
    ),
    "NCCL_CROSS_NIC": ("", "NCCL decides by the fabric (2 since 2.13); measure before you set it"),
    "NCCL_PXN_DISABLE": ("2.12", "0 is NCCL's default: a GPU may use its neighbour's nearer NIC over NVLink"),
    "NCCL_NVLS_ENABLE": ("2.17", "NVLink SHARP; 2, NCCL's default, uses it where the hardware has it"),
    "NCCL_ALGO": ("2.5", "NCCL's own choice is made by size and topology; a forced one is wrong for most sizes"),
    "NCCL_PROTO": ("2.5", "as NCCL_ALGO; forcing LL128 where the hardware lacks it corrupts data"),
    "NCCL_TOPO_FILE": ("2.6", "an XML file of the machine's topology; cloud images that need one set it themselves"),
    "NCCL_TOPO_DUMP_FILE": ("2.6", "writes the topology that NCCL found into this file: a diagnostic"),
    "NCCL_TOPO_VERBOSE": ("never", "neither NCCL nor VCCL reads it; NCCL_DEBUG_SUBSYS=GRAPH shows the topology"),
    "NCCL_SOCKET_IFNAME": ("", "your network's interface, where NCCL takes a wrong one (docker0, a VPN)"),
    "GLOO_SOCKET_IFNAME": (
        "",
        "your network's interface, where the host name leads to a wrong one; lo on one machine",
    ),
    # NCCL: memory
    "NCCL_BUFFSIZE": ("", "bytes of the buffer between two GPUs, per channel; 4194304 by default"),
    "NCCL_CUMEM_ENABLE": ("2.18", "cuMem allocation of NCCL's buffers; since 2.19 on where the system supports it"),
    "NCCL_CUMEM_HOST_ENABLE": (
        "2.23",
        "the same for host memory; since 2.24 on with driver 12.6; containers without NUMA rights need 0",
    ),
    "NCCL_CUMEM_POOL_SIZE": ("never", "in a VCCL guide; neither NCCL nor VCCL reads it"),
    "NCCL_CUMEM_PREALLOC": ("never", "in a VCCL guide; neither NCCL nor VCCL reads it"),
    "NCCL_MAX_NCHANNELS": ("2.5", "most channels, so most SMs, that NCCL takes; deprecated, NCCL_MAX_CTAS since 2.17"),
    "NCCL_GRAPH_REGISTER": ("2.11", "NCCL's default serves: the graphs of this project hold no communicator"),
    # NCCL: InfiniBand and RoCE
    "NCCL_IB_DISABLE": ("", "1 forces TCP: a diagnostic; without InfiniBand NCCL takes TCP by itself"),
    "NCCL_IB_HCA": (
        "",
        "your cluster's NICs (`ibstat`; =mlx5_0 is the exact name); needed by vccl-ft, and to leave a NIC out",
    ),
    "NCCL_IB_GID_INDEX": ("2.1.4", "RoCE before NCCL 2.21: 3 on most; since then NCCL finds it"),
    "NCCL_IB_TC": ("2.1.15", "RoCE traffic class, from your network's administrator"),
    "NCCL_IB_SL": ("2.1.4", "InfiniBand service level, from your network's administrator"),
    "NCCL_IB_RETRY_CNT": ("2.1.15", "7 is the default and the maximum"),
    "NCCL_IB_TIMEOUT": ("", "4.096 us x 2 to this power per try: 20 (4.3 s) since 2.23, 18 since 2.14, 14 before"),
    "NCCL_IB_QPS_PER_CONNECTION": ("2.10", "queue pairs per connection, 1 by default: more spread over more paths"),
    "NCCL_IB_SPLIT_DATA_ON_QPS": ("2.18", "1 splits each message over the queue pairs; 0 since 2.20"),
    "NCCL_IB_AR_THRESHOLD": ("2.6", "bytes above which data can be routed adaptively; 8192 by default"),
    "NCCL_IB_ADAPTIVE_ROUTING": ("2.16", "on by default on InfiniBand, off on RoCE"),
    # NCCL: what it says
    "NCCL_DEBUG": ("", "VERSION, WARN, INFO or TRACE; another word, as ERROR, prints nothing"),
    "NCCL_DEBUG_SUBSYS": ("2.3.4", "the parts of NCCL that INFO is about; INIT,BOOTSTRAP,ENV by default"),
    "NCCL_DEBUG_FILE": (
        "2.2.12",
        "a file for NCCL's lines; %h is the host, %p the process: without them ranks overwrite it",
    ),
    # VCCL
    "NCCL_PASS_SM": ("VCCL", "1: transfers without GPU kernels; NCCL does not read it"),
    "NCCL_ENABLE_FAULT_TOLERANCE": ("VCCL", "1: a failed NIC's traffic moves to another; not with NCCL_PASS_SM"),
    "NCCL_TELEMETRY_ENABLE": ("VCCL", "1: the rate of each flow; not with NCCL_PASS_SM"),
    "NCCL_RETRY_COUNT": ("never", "in VCCL's guide for its fault tolerance; its source reads NCCL_IB_RETRY_CNT"),
    "NCCL_TIMEOUT": ("never", "in VCCL's guide for its fault tolerance; its source reads NCCL_IB_TIMEOUT"),
    "NCCL_PSM_BUFFER_SIZE": ("VCCL", "VCCL's automatic size serves"),
    "NCCL_PSM_P2P_NCHANNELS": ("VCCL", "VCCL's automatic number serves"),
    "LD_PRELOAD": ("", "the vccl sets put their library here, before yours"),
    "LD_LIBRARY_PATH": ("", "the vccl sets put their folder here, before yours"),
    "VCCL_LIBRARY": ("", "where your VCCL is: the .so or its folder; the vccl sets look here first"),
    # torch
    "PYTORCH_CUDA_ALLOC_CONF": (
        "torch 1.8",
        "options of the GPU allocator; PYTORCH_ALLOC_CONF since torch 2.9. max_split_size_mb, from before "
        "expandable_segments (2.1), keeps large blocks whole; with expandable segments it has nothing left to do",
    ),
    "PYTORCH_ALLOC_CONF": ("torch 2.9", "the new name of PYTORCH_CUDA_ALLOC_CONF"),
    "TORCH_NCCL_BLOCKING_WAIT": (
        "torch 2.2",
        "makes every wait block the CPU: slower; the timeout works without it",
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("torch 2.2", "3 is torch's default: a rank whose collective fails ends"),
    "TORCH_DISTRIBUTED_DEBUG": ("torch 1.9", "INFO or DETAIL; DETAIL synchronises every collective"),
    # CUDA
    "CUDA_HOME": ("", "where nvcc is, to compile extensions; training reads nothing from it"),
    "CUDA_LAUNCH_BLOCKING": ("", "1 waits for every kernel: to find the line of a GPU error; many times slower"),
    "CUDA_DEVICE_ORDER": ("", "PCI_BUS_ID numbers the GPUs as nvidia-smi does"),
    # libraries
    "TRANSFORMERS_OFFLINE": ("", "1 blocks the first download of a base model; set it after that"),
    "HF_HUB_OFFLINE": ("", "as TRANSFORMERS_OFFLINE"),
    "HF_HOME": ("", "where Hugging Face keeps downloads; default: ~/.cache/huggingface"),
    "TOKENIZERS_PARALLELISM": ("", "threads of the tokenizer in one process; data prepare uses processes instead"),
}

# beginning of the name: the same, for every variable of a family
FAMILIES: dict[str, tuple[str, str]] = {
    "NCCL_COMPRESSION": ("never", "in a VCCL guide; neither NCCL nor VCCL compresses, and neither reads it"),
    "NCCL_SRS_": ("never", "in a VCCL guide; not in VCCL's source"),
    "NCCL_TELEMETRY_": ("VCCL", "VCCL's flow telemetry (vccl-ft)"),
    "NCCL_PSM_": ("VCCL", "VCCL's SM-free transfers (vccl)"),
    "NVTE_": ("", "Transformer Engine's"),
    "TORCHELASTIC_": ("torch 1.9", "torchrun sets them in its ranks; left over in a shell they are removed"),
    "PET_": ("torch 1.10", "torchrun's options; the executors set them"),
    "MLFLOW_": ("", "MLflow reads it, where log.loggers names mlflow (docs/loggers.md)"),
    "WANDB_": ("", "Weights & Biases: used where log.loggers names wandb, else off (docs/loggers.md)"),
    "CPT_": ("", "this project's own"),
}


@dataclass(frozen=True)
class Explanation:
    """What is known of a variable.

    Args:
        since: the version of its library that introduced it; `never` if no library reads it; empty if not recorded.
        text: what it does and what to think of it.
        known: false for a variable that neither a set nor these tables name.
    """

    since: str
    text: str
    known: bool = True


def explain(key: str) -> Explanation:
    """What is known of a variable, with the reason of each set that sets it."""
    parts = {"base": BASE, **SETS, **TIERS}
    reasons = {part[key][1]: name for name, part in parts.items() if key in part}
    family = next((FAMILIES[start] for start in FAMILIES if key.startswith(start)), ("", ""))
    since, text = KNOWN.get(key, family if not reasons else (family[0], ""))
    texts = [text, *(f"{name}: {reason}" for reason, name in reasons.items())]
    if not any(texts):
        return Explanation("", "unknown: no set and no table here names it", known=False)
    return Explanation(since, "; ".join(filter(None, texts)))
