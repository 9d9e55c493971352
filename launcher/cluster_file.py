"""Cluster files: where a run goes and what it may take there, as YAML that is checked before anything is sent.

Text from these files ends in shell scripts, in Slurm directives and in Kubernetes manifests. Names are limited to what
those accept without quotes; paths and values may hold anything printable and are quoted by whoever writes them.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from common.errors import UserError


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
SlurmTime = Annotated[str, _Matching(r"([0-9]+-)?[0-9]+(:[0-9][0-9]){0,2}")]
Option = Annotated[str, _Matching(r"[a-z][a-z0-9-]*")]
# a #SBATCH line is split by Slurm's own rules, not a shell's: nothing that either would read as more than text
OptionValue = Annotated[str, _Matching(r"[A-Za-z0-9_.,:;/@%+=*()&|\[\]-]+")]
SrunWord = Annotated[str, _Matching(rf"--[a-z][a-z0-9-]*(=[^{_UNPRINTABLE}]*)?")]
DnsLabel = Annotated[str, _Matching(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")]
DnsName = Annotated[str, _Matching(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")]
Quantity = Annotated[str, _Matching(r"[1-9][0-9]*(Ki|Mi|Gi|Ti|m)?")]
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[str, _Matching(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL}")]
LabelValue = Annotated[str, _Matching(_LABEL)]
Count = Annotated[int, Field(ge=1, le=100_000)]

# what the launcher decides; a second value would contradict it, or run something else
RESERVED = {
    "array", "chdir", "error", "export", "input", "job-name", "nodes", "ntasks", "ntasks-per-node", "output",
    "parsable", "requeue", "no-requeue", "signal", "wrap", "account", "partition", "time",
}  # fmt: skip


def _text_of(value: Any) -> Any:
    """`gpus: 8` and `exclusive: true` are what people write; everything else must be text already."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, regex_engine="python-re")


class Local(_Part):
    """The cluster's commands are on this machine, and its nodes see this folder."""

    kind: Literal["local"] = "local"


class Ssh(_Part):
    """The cluster is reached through ssh; `workdir` there holds a checkout with its own Python and data.

    Args:
        identity: private key file here; without it ssh agent and default keys.
        job_dir: folder on the cluster for batch scripts and their logs; default: the run directory there.
    """

    kind: Literal["ssh"]
    host: Host
    user: Name
    identity: Text | None = None
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    job_dir: PlainPath | None = None


class Slurm(_Part):
    """What only Slurm knows.

    Args:
        sbatch: more #SBATCH options, name to value (True for a flag): `gres: gpu:h100:8`, `qos: high`.
        srun: more words for srun, such as `--cpu-bind=cores`.
        stop_before_end_s: seconds before the time limit at which the run is asked to save and stop.
        requeue: a stopped or preempted job goes back to the queue and resumes.
    """

    sbatch: dict[Option, Literal[True] | Annotated[OptionValue, BeforeValidator(_text_of)]] = {}
    srun: list[SrunWord] = []
    stop_before_end_s: Annotated[int, Field(ge=10, le=65535)] = 120
    requeue: bool = True

    @model_validator(mode="after")
    def _not_ours(self) -> Slurm:
        taken = sorted({name for name in self.sbatch if name in RESERVED or name.startswith("container")})
        if taken:
            raise ValueError(f"the launcher sets {', '.join(taken)} itself")
        return self


class Docker(_Part):
    """What only Docker knows.

    Args:
        network: bridge is Docker's default; host where the daemon has no bridge.
    """

    network: Literal["bridge", "host"] = "bridge"


class Mpirun(_Part):
    """What only mpirun knows.

    Args:
        hostfile: Open MPI's list of hosts, one a line (`NAME slots=N`); default: this machine.
        args: more words for mpirun, such as `--mca btl_tcp_if_include eth0`, one word each.
    """

    hostfile: Text | None = None
    args: list[Text] = []


class K8s(_Part):
    """What only Kubernetes knows.

    Args:
        context: of the kubeconfig; default: its current one.
        pvc: claim that holds the checkout, the data and `runs`, mounted at `workdir`.
        gpu_resource: what a node calls its GPUs.
        shm_size: of /dev/shm, counted as memory of the pod.
        memory: limit of a pod.
    """

    namespace: DnsLabel = "default"
    context: Text | None = None
    pvc: DnsName
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
        time: limit of a job, as Slurm writes it (HH:MM:SS); quote it, YAML reads 1:30:00 as a number.
        image: container image; without one the job runs in the node's own Python.
        mounts: SOURCE:TARGET[:ro] into the container, beside `workdir`.
        workdir: the checkout as the nodes see it; default: the folder that the command is typed in.
        python: the interpreter there; default: `python` in a container, this interpreter without one.
        gpu_memory_gib: memory of each GPU there, to choose the micro batch before the run is submitted; without it
            the ranks choose when they start.
        tier: a layer of the environment: how much is logged, how long collectives wait.
        collectives: nccl is the default and adds nothing; gloo and vccl add their environment layer.
        env: variables that this site needs (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), over the environment set.
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
    collectives: Literal["nccl", "gloo", "vccl"] = "nccl"
    env: dict[Variable, AnyText] = {}
    wait: bool = True
    tunnel: Annotated[Local | Ssh, Field(discriminator="kind")] = Local()
    slurm: Slurm = Slurm()
    docker: Docker = Docker()
    mpirun: Mpirun = Mpirun()
    k8s: K8s | None = None

    @property
    def env_layers(self) -> tuple[str, ...]:
        """Environment sets that the file adds to the recipe's (common/environment/merge.py)."""
        layers = (self.collectives if self.collectives != "nccl" else None, self.tier)
        return tuple(layer for layer in layers if layer)

    @model_validator(mode="after")
    def _fits_together(self) -> Cluster:
        if self.mounts and not self.image:
            raise ValueError("mounts are for containers: give an image, or leave them out")
        if isinstance(self.tunnel, Ssh) and not self.workdir:
            raise ValueError("over ssh the launcher cannot know the checkout there: give workdir")
        return self


def load(path: str | Path) -> Cluster:
    """The cluster that the file describes.

    Raises:
        UserError: unreadable, not YAML, an unknown field, or a value that a field does not take; with its line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        repeated = _repeated(node)
        rows = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as problem:
        found = str(problem)
        raise _refusal(
            path, "cannot be read", "a YAML file in UTF-8", found, "see docs/clusters for examples"
        ) from None
    except yaml.YAMLError as problem:
        found = " ".join(str(problem).split())
        raise _refusal(path, "is not YAML", "name: value lines", found, "quote text that holds : # or []") from None
    if repeated:
        raise _refusal(
            path, f"line {repeated[1]}: {repeated[0]!r} is there twice", "each name once", "two", "delete one"
        )
    if not isinstance(rows, dict):
        raise _refusal(
            path, "is not a cluster", "name: value lines", type(rows).__name__, "see docs/clusters for examples"
        )
    try:
        return Cluster.model_validate(rows)
    except ValidationError as problem:
        first = problem.errors()[0]
    where = [part for part in first["loc"] if part not in ("local", "ssh") or part in _names_in(rows)]
    raise _field_refusal(path, node, rows, where, first)


def _field_refusal(path: str | Path, node: Any, rows: Any, where: list[Any], first: Any) -> UserError:
    """Turn pydantic's first complaint into ours."""
    shown = [part for part in where if part != "[key]" and not _is_type_word(part)]
    name, line = ".".join(map(str, shown)) or "the file", _line(node, shown)
    head = f"line {line}: {name}" if line else name
    found = repr(first["input"])
    if first["type"] == "extra_forbidden":
        known = _fields(shown[:-1])
        near = difflib.get_close_matches(str(shown[-1]), known, n=1, cutoff=0.5)
        do = f"did you mean {near[0]!r}?" if near else "delete it; docs/clusters.md says what each field does"
        return _refusal(
            path, f"{head} is no field of a cluster file", "one of " + ", ".join(known), repr(shown[-1]), do
        )
    if first["type"] == "string_type":
        return _refusal(
            path, f"{head} is not text", "text", f"{found}, which YAML reads as no text", "write it in quotes"
        )
    if first["type"] == "string_pattern_mismatch":
        wanted = f"text that matches {first['ctx']['pattern']}"
        return _refusal(path, f"{head} cannot be used safely", wanted, found, "use plain characters")
    return _refusal(path, f"{head}: {first['msg']}", first["msg"], found, "correct the value; see docs/clusters.md")


def _refusal(path: str | Path, problem: str, expected: str, found: str, do: str) -> UserError:
    return UserError(f"cluster file {path}: {problem}", expected=expected, found=found[:300], do=do)


def _is_type_word(part: Any) -> bool:
    """pydantic puts the branch of a union into the location: `literal[True]`, `function-before[...]`."""
    return isinstance(part, str) and "[" in part


def _names_in(rows: Any) -> set[Any]:
    return set(rows) if isinstance(rows, dict) else set()


def _fields(where: list[Any]) -> list[str]:
    """The fields of the file, or of one of its parts (of each kind that the part may be)."""
    of = Cluster.model_fields[where[0]].annotation if where else Cluster
    kinds = [kind for kind in (of, *get_args(of)) if isinstance(kind, type) and issubclass(kind, _Part)]
    return sorted({field for kind in kinds for field in kind.model_fields})


def _line(node: Any, where: list[Any]) -> int | None:
    """The line of the deepest part of `where` that the file has."""
    line = None
    for part in where:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _repeated(node: Any) -> tuple[str, int] | None:
    """The first name that one mapping has twice; YAML itself would take the last without a word."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen if isinstance(key.value, str) else False:
                return key.value, key.start_mark.line + 1
            seen.add(str(key.value))
            if (found := _repeated(value)) is not None:
                return found
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            if (found := _repeated(child)) is not None:
                return found
    return None


def plain_name(name: str) -> str:
    """A run's name, if schedulers take it as a job's name.

    Raises:
        UserError: it holds anything but letters, digits and . _ - (Slurm expands %, Kubernetes takes no spaces).
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise UserError(
            f"{name!r} cannot name a job",
            expected="1 to 63 of A-Z a-z 0-9 . _ -, a letter or digit first",
            found=repr(name),
            do="--name my-run",
        )
    return name
