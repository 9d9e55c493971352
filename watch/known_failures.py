"""The table of known failures: what a log says, what it means, what to do, and whether the same command can work again.

An entry is found by the wording of the library that failed. The order counts where a text fits several entries: the
exact ones stand before the general ones. `tests/watch/logs/NAME.log` holds a sample of each.
"""

from __future__ import annotations

from collections.abc import Callable

from data.indexed import CUT_SHORT
from watch.known_failure import KnownFailure, Match


def find_known(text: str, wanted: Callable[[KnownFailure], bool] = lambda _: True) -> Match | None:
    """The entry that fits a text: exact ones before consequences, then in the order of the table.

    Args:
        wanted: which entries to look for; by default all.
    """
    matches = [match for failure in KNOWN_FAILURES if wanted(failure) and (match := failure.search(text))]
    return next(iter(sorted(matches, key=lambda match: match.failure.is_consequence)), None)


_MEMORY_WORDS = r"(?:Tried to allocate (?P<wanted>[\d.]+ \w+)\.? )?"
_GPU_WORDS = (
    r"(?:GPU (?P<gpu>\d+) has a total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free)?"
)

KNOWN_FAILURES: tuple[KnownFailure, ...] = (
    # -- memory --------------------------------------------------------------------------------------------------------
    KnownFailure(
        name="cuda_oom",
        patterns=(
            r"CUDA out of memory\. " + _MEMORY_WORDS + _GPU_WORDS,
            r"torch\.(?:cuda\.)?OutOfMemoryError",
            r"CUDA (?:driver )?error: out of memory",
            r"Cuda failure (?:2 )?'out of memory'",
            r"CUBLAS_STATUS_ALLOC_FAILED",
        ),
        cause="GPU memory ran out[: {wanted} more were asked for][ of GPU {gpu}][, {free} of {total} were free]",
        advice="data.micro_batch_size=1 (the global batch stays, so the training is the same); "
        "then data.seq_length=1024 model.config.seq_length=1024",
    ),
    KnownFailure(
        name="shared_memory",
        patterns=(
            r"Error while creating shared memory segment (?P<segment>/dev/shm/\S+) \(size (?P<size>\d+)\)",
            r"insufficient shared memory \(shm\)",
            r"dataloader's workers are out of shared memory",
            r"unable to (?:allocate|open|write to) shared memory",
            r"unable to mmap \d+ bytes from file <(?P<segment>/torch_[^>]+)>: Cannot allocate memory",
            r"No space left on device: '?(?P<segment>/dev/shm/[^']+)",
        ),
        cause="the shared memory of this machine (/dev/shm) is full[: {segment}]",
        advice="docker run --ipc=host, or --shm-size=8g; else --env +nccl-no-shm (python launch.py doctor)",
    ),
    KnownFailure(
        name="host_oom",
        patterns=(
            r"Out of memory: Killed process (?P<pid>\d+) \((?P<process>[^)]*)\).*anon-rss:(?P<rss_kb>\d+)kB",
            r"Memory cgroup out of memory: Killed process (?P<pid>\d+) \((?P<process>[^)]*)\)",
            r"Detected \d+ oom[-_]kill event",
            r"\boom-kill event\(s\) in ",
            r"job \S+ ended as OUT_OF_MEMORY",
            r"\bOOMKilled\b",
            r"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) (?:is killed by signal: Killed|exited unexpectedly)",
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory[^\n]*?allocate (?P<wanted_bytes>\d+) bytes",
            r"^(?:\w+\.)*MemoryError\b(?m:.*)",
            r"\[Errno 12\] Cannot allocate memory",
        ),
        cause="the memory of the host ran out[: the kernel killed process {pid}][ ({process})]",
        advice="ask for more host memory (sbatch: {mem: ...} in the cluster file, docker -m), or use less: "
        "data.num_workers=1, fewer ranks per node, no other jobs on the machine",
        can_retry=True,  # another job's peak may be over
    ),
    # -- GPUs and driver -----------------------------------------------------------------------------------------------
    KnownFailure(
        name="ecc",
        patterns=(
            r"uncorrectable ECC error encountered",
            r"NVRM: Xid \(PCI:(?P<pci>[^)]+)\): (?P<xid>48|63|64|94|95),",
            r"CUDA error: .*(?i:ecc) error",
        ),
        cause="a GPU has an uncorrectable memory error[ (Xid {xid} at {pci})]",
        advice="drain this node and reset the GPU (nvidia-smi -r, or a reboot); replace it if it comes back; "
        "on other nodes the run can go on: {resume}",
        can_retry=True,
    ),
    KnownFailure(
        name="gpu_lost",
        patterns=(
            r"NVRM: Xid \(PCI:(?P<pci>[^)]+)\): (?P<xid>79|74|119|120),",
            r"GPU has fallen off the bus",
            r"\bGPU is lost\b",
            r"Unable to determine the device handle for GPU",
        ),
        cause="a GPU no longer answers[ (Xid {xid} at {pci})]",
        advice="reboot the node and check its power and PCIe seat; on other nodes the run can go on: {resume}",
        can_retry=True,
    ),
    KnownFailure(
        name="driver",
        patterns=(
            r"The NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"system has unsupported display driver / cuda driver combination",
            r"forward compatibility was attempted on non supported HW",
            r"the provided PTX was compiled with an unsupported toolchain",
            r"no kernel image is available for execution on the device",
            r"Driver/library version mismatch",
        ),
        cause="the NVIDIA driver and this installation of CUDA do not fit each other[ (the driver has CUDA {found})]",
        advice="a newer driver, or a torch (or container) built for the driver's CUDA version; after a driver update "
        "reboot: python launch.py doctor shows both versions",
    ),
    # -- libraries -----------------------------------------------------------------------------------------------------
    KnownFailure(
        name="nccl_version",
        patterns=(
            r"Mismatched NCCL version detected : rank (?P<rank_a>\d+) version (?P<a>\d+) rank \d+ version (?P<b>\d+)",
            r"undefined symbol: (?P<symbol>nccl\w+)",
            r"NCCL_STATUS_VERSION|NCCL version mismatch",
        ),
        cause="two versions of NCCL are in use[: {a} and {b}][: {symbol} is missing in the one that was loaded]",
        advice="the same container or virtual environment on all nodes; unset LD_PRELOAD and LD_LIBRARY_PATH entries "
        "that hold another libnccl.so.2",
    ),
    KnownFailure(
        name="te_symbol",
        patterns=(
            r"transformer_engine\S*: undefined symbol: (?P<symbol>\S+)",
            r"Could not find shared object file for Transformer Engine",
            r"ImportError: \S*flash_attn\S*: undefined symbol: (?P<symbol>\S+)",
            r"ImportError: \S+\.so\S*: undefined symbol: (?P<symbol>\S+)",
        ),
        cause="a compiled library was built for another torch or CUDA[: symbol {symbol} is missing]",
        advice="install it again against this torch: pip install --no-build-isolation 'transformer_engine[pytorch]'",
    ),
    KnownFailure(
        name="attention_backend",
        patterns=(r"No dot product attention (?:backend|support)",),
        cause="Transformer Engine has no attention kernel for these shapes and this GPU",
        advice="unset NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN, or set NVTE_UNFUSED_ATTN=1",
    ),
    # -- data ----------------------------------------------------------------------------------------------------------
    KnownFailure(
        name="token_ids",
        patterns=(
            r"token ids outside the model's vocabulary",
            r"IndexError: index out of range in self",
            r"Assertion `?srcIndex < srcSelectDimSize`? failed",
            r"Indexing\.cu:\d+: .*Assertion .*index.* failed",
            r"Assertion `t >= 0 && t < n_classes` failed",
        ),
        cause="the data has token ids outside the model's vocabulary",
        advice="prepare the corpus with the model's own tokenizer: python launch.py data prepare -h; "
        "python launch.py data inspect FOLDER shows the ids",
    ),
    KnownFailure(
        name="corrupt_data",
        patterns=(
            r"(?P<path>\S+\.(?:bin|idx)) (?:is not an index|is missing|" + CUT_SHORT + ")",
            r"mmap length is greater than file size",
            r"cannot mmap an empty file",
            r"buffer is smaller than requested size",
            r"offset must be non-negative and no greater than buffer length",
            r"Bad header, cannot be read",
            r"mmap'ed file .* is truncated",
        ),
        cause="a prepared corpus is damaged or cut off[: {path}]",
        advice="copy the .bin and .idx again, or prepare the corpus again; python launch.py data inspect FOLDER checks "
        "them",
    ),
    # -- training ------------------------------------------------------------------------------------------------------
    KnownFailure(
        name="diverged",
        patterns=(
            r"Unexpected result (?P<kind>nan|inf) \(message='(?P<message>[^']+)'\)",
            r"found (?P<kind>NaN|Inf) in local (?P<message>grad norm|forward loss)",
            r"(?i)\bloss is (?P<kind>nan|inf)\b",
        ),
        cause="the training diverged: {kind} in step {step} at a learning rate of {lr}; {last_good}",
        advice="a lower learning rate ({lower_lr}) or a longer warm-up; {checkpoint}",
    ),
    # -- files ---------------------------------------------------------------------------------------------------------
    KnownFailure(
        name="quota",
        patterns=(
            r"\[Errno 122\] Disk quota exceeded(?:: '(?P<path>[^']+)')?",
            r"Disk quota exceeded",
        ),
        cause="the disk quota is used up[: {path}]",
        advice="delete what is not needed (old runs, caches), or ask for more quota; then {resume}",
    ),
    KnownFailure(
        name="disk_full",
        patterns=(
            r"\[Errno 28\] No space left on device(?:: '(?P<path>[^']+)')?",
            r"No space left on device",
            r"PytorchStreamWriter failed writing file",
            r"inline_container\.cc:\d+\][^\n]*unexpected pos",
        ),
        cause="the disk is full[: {path}]",
        advice="make room under {run} (a checkpoint needs {checkpoint_size}; log.ckpt.keep_last=1 keeps fewer), "
        "then {resume}",
    ),
    KnownFailure(
        name="checkpoint_writer",
        patterns=(
            r"(?P<checkpoint>step-\d+) could not be saved\n[^\n]*\n +found: (?P<found>[^\n]+)",
            r"(?P<checkpoint>step-\d+) is not complete",
        ),
        cause="{checkpoint} could not be saved[: {found}]",
        advice="a save needs host memory for a copy of weights and optimizer state ({checkpoint_size}): close other "
        "programs or ask for more; then {resume}",
        can_retry=True,
    ),
    KnownFailure(
        name="hang",
        patterns=(
            r"no step ended for (?P<seconds>\d+) s\n",
            r"DataLoader timed out after (?P<seconds>\d+) seconds",
        ),
        cause="the run hung for {seconds} s",
        advice="the stacks of the threads are at the end of {run}/logs/attempt-*/rank-*.log: a data worker that was "
        "stopped, a file system that does not answer, a GPU that is gone; then {resume}",
        can_retry=True,
    ),
    KnownFailure(
        name="frozen_rank",
        patterns=(
            r"has given no sign of life for (?P<seconds>\d+) s\n[^\n]*\n +found: process \d+ on (?P<found>[^;\n]+)",
        ),
        cause="a rank gave no sign of life for {seconds} s; its process on {found}",
        advice="it was stopped (SIGSTOP), a file system does not answer, or a library does not return: see the last "
        "lines of {run}/logs/attempt-*/rank-*.log; then {resume}",
        can_retry=True,
    ),
    KnownFailure(
        name="other_loss",
        patterns=(r"the resumed run does not go on where it stopped[\s\S]*?found: (?P<found>[^\n]+)",),
        cause="the resumed run does not go on where it stopped: {found}",
        advice="`python launch.py list {run} --verify` checks the checkpoints; delete a bad one, then {resume}",
    ),
    KnownFailure(
        name="read_only",
        patterns=(r"\[Errno 30\] Read-only file system(?:: '(?P<path>[^']+)')?", r"Read-only file system"),
        cause="a file system is mounted read-only[: {path}]",
        advice="write to another one: start the command in a folder that can be written, "
        "and data.index_mapping_dir=FOLDER for the index files of the corpus",
    ),
    KnownFailure(
        name="permission",
        patterns=(r"\[Errno 13\] Permission denied(?:: '(?P<path>[^']+)')?",),
        cause="this user may not write or read a file[: {path}]",
        advice="check its owner and mode (ls -l); in a container check which user it runs as",
    ),
    KnownFailure(
        name="open_files",
        patterns=(r"\[Errno 24\] Too many open files", r"received 0 items of ancdata"),
        cause="this process has too many open files",
        advice="ulimit -n 65536 before the command, or fewer data workers (data.num_workers=1)",
    ),
    KnownFailure(
        name="damaged_checkpoint",
        patterns=(
            r"PytorchStreamReader failed (?:reading|finding)",
            r"(?:_pickle\.)?UnpicklingError: pickle data was truncated",
            r"Invalid magic number; corrupt file\?",
            r"CheckpointException: (?P<text>[^\n]+)",
        ),
        cause="a checkpoint is damaged or does not fit this model[: {text}]",
        advice="set the newest checkpoint aside (rename its folder under {run}/checkpoints), then {resume}",
    ),
    # -- accounts and the hub ------------------------------------------------------------------------------------------
    KnownFailure(
        name="wandb_login",
        patterns=(
            r"wandb\S*(?:UsageError|AuthenticationError|CommError): [^\n]*(?:api_key|API key|login)",
            r"api_key not configured \(no-tty\)",
        ),
        cause="Weights & Biases asks for a login",
        advice="WANDB_MODE=disabled (what this project sets), WANDB_MODE=offline, or WANDB_API_KEY=...",
    ),
    KnownFailure(
        name="hub_offline",
        patterns=(
            r"We couldn't connect to '(?P<url>https://huggingface\.co[^']*)'",
            r"LocalEntryNotFoundError",
            r"OfflineModeIsEnabled",
        ),
        cause="a file of the Hugging Face hub is neither in the cache nor can it be downloaded",
        advice="download it once where there is a network (huggingface-cli download NAME) and give the folder, "
        "or unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE",
    ),
    # -- the ranks find each other -------------------------------------------------------------------------------------
    KnownFailure(
        name="port_in_use",
        patterns=(
            r"The server socket has failed to (?:listen|bind)[^\n]*?port: (?P<port>\d+)",
            r"EADDRINUSE|\[Errno 98\] Address already in use",
        ),
        cause="the port of the rendezvous is in use[: {port}]",
        advice="unset MASTER_PORT, or set another one (python launch.py doctor prints a free one); "
        "an earlier run may still be there: ps aux | grep rank_main",
        can_retry=True,
    ),
    KnownFailure(
        name="libuv",
        patterns=(r"use_libuv was requested but PyTorch was (?:built|build) without libuv support",),
        cause="torch's store was asked to use libuv, and this torch is built without it",
        advice="USE_LIBUV=0",
    ),
    KnownFailure(
        name="host_name",
        patterns=(
            r"Name or service not known",
            r"Temporary failure in name resolution",
            r"Unable to resolve hostname to a \(local\) address(?!\. Using the loopback)",  # a warning, and it goes on
        ),
        cause="a host name does not resolve",
        advice="add the host to /etc/hosts, or set MASTER_ADDR to an address (127.0.0.1 on one machine): "
        "python launch.py doctor",
    ),
    KnownFailure(
        name="gloo_interface",
        patterns=(
            r"Unable to find address for: (?P<interface>\S+)",
            r"makeDeviceFor(?:Interface|Hostname)\(\): unsupported gloo device",
            r"gloo/transport/tcp/device\.cc:\d+\] ifa != nullptr",
            r"gloo/transport/tcp/device\.cc:\d+\] rv != -1",
        ),
        cause="Gloo finds no network interface to use[: {interface}]",
        advice="GLOO_SOCKET_IFNAME=lo on one machine, the name of your network's interface on several "
        "(ip -brief address lists them): python launch.py doctor",
    ),
    KnownFailure(
        name="nccl_interface",
        patterns=(r"Bootstrap : no socket interface found", r"no socket interface found"),
        cause="NCCL finds no network interface to use",
        advice="NCCL_SOCKET_IFNAME=lo on one machine, the name of your network's interface on several: "
        "python launch.py doctor",
    ),
    KnownFailure(
        name="duplicate_gpu",
        patterns=(r"Duplicate GPU detected : rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA device (?P<device>\w+)",),
        cause="two ranks were given the same GPU: ranks {a} and {b}",
        advice="one GPU per rank: --devices as many as there are GPUs (nvidia-smi -L), and check CUDA_VISIBLE_DEVICES",
    ),
    KnownFailure(
        name="nccl_ib",
        patterns=(
            r"NET/IB ?: Got completion from peer (?P<peer>\S+) with status=(?P<status>\S+)",
            r"NET/IB ?: Got completion with error (?P<status>\d+)",
            r"Call to ibv_(?P<call>\w+) failed with error (?P<status>[^\n]+)",
            r"NET/IB ?: \S+ (?:A|a)sync fatal event",
        ),
        cause="an InfiniBand or RoCE transfer failed[ to {peer}][, status {status}]",
        advice="check the port and cable (ibstat, ibdiagnet), the same GID index and MTU on all nodes, and "
        "ulimit -l unlimited; NCCL_IB_HCA names the adapters to use; NCCL_IB_DISABLE=1 shows whether TCP works",
        can_retry=True,
    ),
    KnownFailure(
        name="nccl_init",
        patterns=(
            r"retrieving ncclUniqueId from \[0\] via c10d key-value store by key '[^']*', but [^\n]*?"
            r"(?:got error: (?P<error>[^.\n]+))",
            r"ncclCommInitRank\w* (?:failed|returned)",
            r"NCCL error in: [^\n]*ncclGetUniqueId",
        ),
        cause="NCCL could not be set up between the ranks[: {error}]",
        advice="rank 0 may have ended first (its log); else check that the nodes reach MASTER_ADDR: "
        "python launch.py doctor",
        can_retry=True,
        is_consequence=True,
    ),
    KnownFailure(
        name="rendezvous",
        patterns=(
            r"DistStoreError: Timed out after \d+ seconds waiting for clients\. (?P<have>\d+)/(?P<want>\d+) clients",
            r"Rendezvous(?:Timeout|Connection|Closed)Error",
            r"The connection to the C10d store has failed",
            r"The client socket has (?:timed out after|failed to connect to)[^\n]*\((?P<address>[^)\s]+, \d+)\)",
        ),
        cause="the ranks did not all come to the rendezvous[: {have} of {want}][ at {address}]",
        advice="check that all nodes have started, and that they reach MASTER_ADDR:MASTER_PORT through the firewall",
        can_retry=True,
        is_consequence=True,
    ),
    # -- schedulers ----------------------------------------------------------------------------------------------------
    KnownFailure(
        name="preempted",
        patterns=(r"CANCELLED AT \S+ DUE TO PREEMPTION", r"job \S+ ended as PREEMPTED"),
        cause="the scheduler took the nodes for another job",
        advice="a requeued job resumes by itself; else {resume}",
        can_retry=True,
    ),
    KnownFailure(
        name="time_limit",
        patterns=(r"CANCELLED AT \S+ DUE TO TIME LIMIT", r"job \S+ ended as (?:TIMEOUT|DEADLINE)", r"DeadlineExceeded"),
        cause="the job's time limit was reached",
        advice="ask for more time, or raise stop_before_end_s in the cluster file so that it saves before; {resume}",
        can_retry=True,
    ),
    KnownFailure(
        name="node_failure",
        patterns=(r"CANCELLED AT \S+ DUE TO NODE FAILURE", r"job \S+ ended as (?:NODE_FAIL|BOOT_FAIL)"),
        cause="a node of the job failed",
        advice="{resume}",
        can_retry=True,
    ),
    KnownFailure(
        name="cancelled",
        patterns=(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*", r"job \S+ ended as CANCELLED"),
        cause="the job was cancelled (scancel)",
        advice="{resume}",
        can_retry=True,
    ),
    # -- other -----------------------------------------------------------------------------------------------------
    KnownFailure(
        name="missing_package",
        patterns=(r"ModuleNotFoundError: No module named '(?P<module>[^']+)'\s*$",),
        cause="the Python package {module} is not installed for the Python that ran this rank",
        advice="make setup, and start with .venv/bin/python; on a cluster check `python` in the cluster file",
    ),
    KnownFailure(
        name="segmentation_fault",
        patterns=(
            r"Fatal Python error: Segmentation fault",
            r"\bSIGSEGV\b",  # torchrun, and common/processes.py
            r"exitcode\s*: -11\b",
            r"Signal: Segmentation fault \(11\)|exited on signal 11\b",  # mpirun
        ),
        cause="a library crashed (segmentation fault)",
        advice="the frames below `Fatal Python error` name it; check that its versions fit (python launch.py doctor)",
        can_retry=True,
        is_consequence=True,
        ends_process=True,
    ),
    KnownFailure(
        name="bus_error",
        patterns=(
            r"Fatal Python error: Bus error",
            r"\bSIGBUS\b",
            r"exitcode\s*: -7\b",
            r"Signal: Bus error \(7\)|exited on signal 7\b",
        ),
        cause="a rank read memory that is no longer there (bus error): a data file that was cut off while it was read, "
        "or a full /dev/shm[: {files}]",
        advice="check the corpus (python launch.py data inspect FOLDER) and /dev/shm (df -h /dev/shm)",
        is_consequence=True,
        ends_process=True,
    ),
    KnownFailure(
        name="killed",
        patterns=(r"Signal 9 \(SIGKILL\)", r"exitcode\s*: -9\b"),
        cause="a rank was killed from outside (SIGKILL)",
        advice="most often the kernel, for lack of memory (dmesg -T | grep -i kill), or an operator; then {resume}",
        can_retry=True,
        is_consequence=True,
        ends_process=True,
    ),
    KnownFailure(
        name="stuck_collective",
        patterns=(
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+),"
            r".*?\) ran for (?P<ms>\d+) milliseconds",
            r"a collective failed, though every rank still answers",
            r"Timed out waiting (?P<ms>\d+)ms for (?P<op>recv|send) operation to complete",
        ),
        cause="a collective did not end[: {op}][ number {seq}][, waited {ms} ms]",
        advice="one rank did not come to it: see its log, its host, its data; CPT_PROCESS_GROUP_TIMEOUT_S sets how "
        "long the others wait; then {resume}",
        can_retry=True,
        is_consequence=True,
        ends_process=True,
    ),
    KnownFailure(
        name="peer_lost",
        patterns=(
            r"lost rank (?P<lost>\d+) on (?P<host>\S+) \([^)]*\): (?P<problem>[^\n;]+)",
            r"Connection closed by (?:remote )?peer \[?(?P<peer>[^\]\s]+)",
            r"Connection reset by peer",
            r"ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely",
            r"NET/Socket : peer (?P<peer>\S+) (?:has )?closed",
        ),
        cause="a rank went away while others waited for it[: rank {lost} on {host}, {problem}][: {peer}]",
        advice="look at that rank's log, its host and its network; then {resume}",
        can_retry=True,
        is_consequence=True,
    ),
    KnownFailure(
        name="cuda_error",
        patterns=(
            r"CUDA error: (?P<error>an illegal memory access was encountered|unspecified launch failure"
            r"|the launch timed out and was terminated|misaligned address|device-side assert triggered)",
            r"Cuda failure (?:\d+ )?'(?P<error>[^']+)'",
            r"NVRM: Xid \(PCI:(?P<pci>[^)]+)\): (?P<xid>\d+),",
        ),
        cause="a kernel failed on a GPU[: {error}][ (Xid {xid} at {pci})]",
        advice="CUDA_LAUNCH_BLOCKING=1 names the kernel; if it comes back on the same GPU only, that GPU is at fault",
        can_retry=True,
        is_consequence=True,
    ),
    KnownFailure(
        name="nccl_system_error",
        patterns=(
            r"ncclSystemError: System call \(e\.g\. socket, malloc\) or external library call failed(?:[^\n]*\n"
            r"Last error:\s*\n?(?P<last>[^\n]+))?",
            r"unhandled system error[^\n]*",
        ),
        cause="NCCL: a system call failed[: {last}]",
        advice="NCCL_DEBUG=WARN names it; python launch.py doctor finds a way that works (shared memory, network)",
        can_retry=True,
        is_consequence=True,
    ),
)
