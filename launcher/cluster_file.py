"""The fields of a cluster file: where a run goes and what it may take there (launcher/load_cluster.py reads it).

Text from these files becomes part of shell scripts, Slurm directives and Kubernetes manifests. Names are limited to
what those accept without quotes; paths and values may hold anything printable, and the code that writes them quotes it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from launcher.volumes import Volume


def _Matching(pattern: str) -> StringConstraints:  # noqa: N802 - reads as a type
    return StringConstraints(pattern=rf"^(?:{pattern})\Z", max_length=4096)


_SAFE = r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,62}"
_UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_PATH = rf"/[^{_UNPRINTABLE}:,%\\]*"  # : and , separate mounts; Slurm expands % and \
Name = Annotated[str, _Matching(_SAFE)]
NameList = Annotated[str, _Matching(rf"{_SAFE}(,{_SAFE})*")]
Text = Annotated[str, _Matching(rf"[^{_UNPRINTABLE}]+")]
AnyText = Annotated[str, _Matching(rf"[^{_UNPRINTABLE}]*")]
Program = Annotated[str, _Matching(rf"[^{_UNPRINTABLE}-][^{_UNPRINTABLE}]*")]  # srun would take -x as its own option
PlainPath = Annotated[str, _Matching(r"/[A-Za-z0-9._/@+=-]*")]
AbsolutePath = Annotated[str, _Matching(_PATH)]
Mount = Annotated[str, _Matching(rf"{_PATH}:{_PATH}(:ro|:rw)?")]
Image = Annotated[str, _Matching(r"[A-Za-z0-9/._~][A-Za-z0-9/._:@#+~-]{0,511}")]
Variable = Annotated[str, _Matching(r"[A-Za-z_][A-Za-z0-9_]*")]
Host = Annotated[str, _Matching(r"[A-Za-z0-9][A-Za-z0-9._-]*")]
HostPattern = Annotated[str, _Matching(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[0-9]{1,6}-[0-9]{1,6}\][A-Za-z0-9._-]*)?")]
SlurmTime = Annotated[str, _Matching(r"([0-9]+-)?[0-9]+(:[0-9][0-9]){0,2}")]
Option = Annotated[str, _Matching(r"[a-z][a-z0-9-]*")]
# Slurm splits an #SBATCH line by its own rules, not by a shell's: no character that either of them interprets
OptionValue = Annotated[str, _Matching(r"[A-Za-z0-9_.,:;/@%+=*()&|\[\]-]+")]
SrunWord = Annotated[str, _Matching(rf"--[a-z][a-z0-9-]*(=[^{_UNPRINTABLE}]*)?")]
DnsLabel = Annotated[str, _Matching(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")]
DnsName = Annotated[str, _Matching(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")]
Quantity = Annotated[str, _Matching(r"[1-9][0-9]*(Ki|Mi|Gi|Ti|m)?")]
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[str, _Matching(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL}")]
LabelValue = Annotated[str, _Matching(_LABEL)]
Count = Annotated[int, Field(ge=1, le=100_000)]

# options that the launcher sets; another value would contradict it, or run something else
RESERVED = {
    "array", "chdir", "error", "export", "input", "job-name", "nodes", "ntasks", "ntasks-per-node", "output",
    "parsable", "requeue", "no-requeue", "signal", "wrap", "account", "partition", "time",
}  # fmt: skip


def _number_as_text(value: Any) -> Any:
    """Accept a number where the option wants text: people write `gpus: 8`."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _expand_range(pattern: str) -> list[str]:
    """`gpu[08-10].lan` as gpu08.lan, gpu09.lan, gpu10.lan: the numbers keep the width of the first one."""
    match = re.fullmatch(r"([^\[]*)\[([0-9]+)-([0-9]+)\](.*)", pattern)
    if match is None:
        return [pattern]
    before, first, last, after = match.groups()
    return [f"{before}{number:0{len(first)}d}{after}" for number in range(int(first), int(last) + 1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, regex_engine="python-re")


class Local(_Part):
    """The cluster's commands run on this machine, and its nodes see this folder."""

    kind: Literal["local"] = "local"


class Ssh(_Part):
    """The cluster is behind ssh; `workdir` there holds a checkout with its own Python and data.

    Args:
        identity: private key file on this machine; default: the ssh agent and the default keys.
        job_dir: folder on the cluster for batch scripts and their logs; default: the run directory there.
    """

    kind: Literal["ssh"]
    host: Host
    user: Name
    identity: Text | None = None
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    job_dir: PlainPath | None = None


class Slurm(_Part):
    """Options for Slurm.

    Args:
        sbatch: more #SBATCH options, name to value (True for a flag): `gres: gpu:h100:8`, `qos: high`.
        srun: more words for srun, such as `--cpu-bind=cores`.
        stop_before_end_s: seconds before the time limit at which the run is asked to save and stop.
        requeue: a job that was preempted, or stopped at its time limit, returns to the queue and resumes.
    """

    sbatch: dict[Option, Literal[True] | Annotated[OptionValue, BeforeValidator(_number_as_text)]] = {}
    srun: list[SrunWord] = []
    stop_before_end_s: Annotated[int, Field(ge=10, le=65535)] = 120
    requeue: bool = True

    @model_validator(mode="after")
    def _refuse_reserved(self) -> Slurm:
        taken = sorted({name for name in self.sbatch if name in RESERVED or name.startswith("container")})
        if taken:
            raise ValueError(f"the launcher sets {', '.join(taken)} itself")
        return self


class Docker(_Part):
    """Options for Docker.

    Args:
        network: bridge is Docker's default; host where the daemon has no bridge.
    """

    network: Literal["bridge", "host"] = "bridge"


class Mpirun(_Part):
    """Options for mpirun.

    Args:
        hosts: names of the machines; `gpu[01-16]` stands for gpu01 to gpu16. As many as the run has nodes are written
            to runs/NAME/hostfile, with a slot per device. Default: this machine.
        hostfile: instead of hosts, Open MPI's own file, one machine per line (`NAME slots=N`).
        args: more words for mpirun, such as `--mca btl_tcp_if_include eth0`, one word each.
    """

    hosts: list[HostPattern] = []
    hostfile: Text | None = None
    args: list[Text] = []

    @property
    def has_hosts(self) -> bool:
        """Whether mpirun starts the ranks on machines of a list, not just on this one."""
        return bool(self.hosts or self.hostfile)

    @property
    def host_names(self) -> list[str]:
        """The machines of `hosts`, each by its own name."""
        return [name for pattern in self.hosts for name in _expand_range(pattern)]

    @model_validator(mode="after")
    def _one_list(self) -> Mpirun:
        if self.hosts and self.hostfile:
            raise ValueError("hosts and hostfile are two lists of the same: leave one out")
        return self


class K8s(_Part):
    """Options for Kubernetes.

    Args:
        context: the kubeconfig's context; default: its current one.
        pvc: claim that holds the checkout, the data and `runs`, mounted at `workdir`; a row of `volumes` mounted there
            can hold them instead.
        volumes: more volumes, NFS among them, as the API has them (launcher/volumes.py).
        gpu_resource: the resource name of the nodes' GPUs.
        shm_size: size of /dev/shm, which counts as the pod's memory.
        memory: memory limit of a pod.
    """

    namespace: DnsLabel = "default"
    context: Text | None = None
    pvc: DnsName | None = None
    volumes: list[Volume] = []
    gpu_resource: LabelKey = "nvidia.com/gpu"
    shm_size: Quantity = "16Gi"
    cpu: Quantity | None = None
    memory: Quantity | None = None
    node_selector: dict[LabelKey, LabelValue] = {}
    service_account: DnsLabel | None = None


class Cluster(_Part):
    """One cluster, as its file describes it (docs/clusters/ has one for each executor).

    Args:
        nodes: nodes that a job may take.
        devices_per_node: ranks, one per GPU, that a job may take on a node.
        time: time limit of a job, as Slurm writes it (HH:MM:SS); in quotes, because YAML reads 1:30:00 as a number.
        image: container image; without one the job runs in the node's own Python.
        mounts: SOURCE:TARGET[:ro] into the container, beside `workdir`.
        workdir: the checkout as the nodes see it; default: the current folder.
        python: the interpreter there; default: `python` in a container, this interpreter without one.
        gpu_memory_gib: memory of each GPU there, to choose the micro batch before the run is submitted; without it
            the ranks choose when they start.
        tier: an environment layer that sets how much is logged and how long collectives wait.
        collectives: gloo, vccl and vccl-ft add their environment layer; nccl, the default, adds none.
        env: variables that this site needs (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, VCCL_LIBRARY); they overrule the
            environment set and the shell of the machine that submits.
        wait: follow the job and end with its exit code; false: submit and return.
    """

    account: Name | None = None
    partition: NameList | None = None
    nodes: Count = 1
    devices_per_node: Count = 1
    time: SlurmTime | None = None
    image: Image | None = None
    mounts: list[Mount] = []
    workdir: AbsolutePath | None = None
    python: Program | None = None
    gpu_memory_gib: Annotated[float, Field(gt=0, le=4096)] | None = None
    tier: Literal["dev", "staging", "prod"] | None = None
    collectives: Literal["nccl", "gloo", "vccl", "vccl-ft"] = "nccl"
    env: dict[Variable, AnyText] = {}
    wait: bool = True
    tunnel: Annotated[Local | Ssh, Field(discriminator="kind")] = Local()
    slurm: Slurm = Slurm()
    docker: Docker = Docker()
    mpirun: Mpirun = Mpirun()
    k8s: K8s | None = None

    @property
    def env_layers(self) -> tuple[str, ...]:
        """The environment sets that the file adds to the recipe's (common/environment/merge.py)."""
        layers = (self.collectives if self.collectives != "nccl" else None, self.tier)
        return tuple(layer for layer in layers if layer)

    @model_validator(mode="after")
    def _check_combinations(self) -> Cluster:
        if self.mounts and not self.image:
            raise ValueError("mounts are for containers: give an image, or leave them out")
        if isinstance(self.tunnel, Ssh) and not self.workdir:
            raise ValueError("behind ssh the launcher does not know the checkout: give workdir")
        if self.k8s and not self.k8s.pvc and not any(one.mount_path == self.workdir for one in self.k8s.volumes):
            raise ValueError("no volume holds the checkout: give k8s.pvc, or a row of k8s.volumes mounted at workdir")
        return self
