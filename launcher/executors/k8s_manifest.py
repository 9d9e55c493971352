"""The Kubernetes objects of a run, as plain data."""

from __future__ import annotations

import logging
import re
from typing import Any

from common.errors import EXIT_NO_RETRY, EXIT_PREFLIGHT, EXIT_USER
from common.machine_facts import MASTER_PORT
from launcher.cluster_file import Cluster, K8s
from launcher.executors import Job
from launcher.executors.on_cluster import rank_environment, torchrun_command

log = logging.getLogger("launch")
PORT = MASTER_PORT  # each pod has an address of its own, where no other run can use the port
# other pods of this Job may be reading the same folder of the claim: each file is copied aside and then renamed
_COPY = 'mkdir -p "$1" && for f in /written/*.*; do n=${f##*/}; cp -L "$f" "$1/.$n.$HOSTNAME" && mv "$1/.$n.$HOSTNAME" "$1/$n" || exit 1; done'  # noqa: E501
_RANKS = "ranks"  # the container
# $1: python, $2: the run directory; then what starts the ranks: it gets the SIGTERM, its exit code hides theirs
_ASK = f"""python=$1 run=$2; shift 2
"$@" & ranks=$!
trap 'stopped=1; kill -TERM "$ranks"' TERM
wait "$ranks"; code=$?
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; code=$?; done
if [ "$code" = 0 ] || [ "$stopped" ]; then exit "$code"; fi
"$python" -m watch.retry_helps "$run" "$code"
if [ "$?" = {EXIT_NO_RETRY} ]; then exit {EXIT_NO_RETRY}; fi
exit "$code"
"""


def kubernetes_name(job: Job) -> str:
    """The run's name as a DNS label that begins with a letter, as pods and the Service need it."""
    name = re.sub(r"[^a-z0-9-]", "-", job.folder.name.lower())
    return (name if name[0].isalpha() else f"run-{name}")[:50].strip("-")


def manifest(job: Job, cluster: Cluster, k8s: K8s) -> list[dict[str, Any]]:
    """ConfigMap with what the launcher wrote, headless Service for several nodes, and the Job; in creation order."""
    name = kubernetes_name(job)
    if name != job.folder.name:
        log.info("k8s: Job %s (of run %s: lower-case letters, digits and - only)", name, job.folder.name)
    meta = {"name": name, "namespace": k8s.namespace, "labels": {"job-of": name}}
    files = {path.name: path.read_text() for path in job.folder.written if path.is_file()}
    objects = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": files}]
    if job.num_nodes > 1:
        spec = {
            "clusterIP": "None",
            "selector": {"job-of": name},
            "publishNotReadyAddresses": True,
            "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
        }
        objects.append({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec})
    return [*objects, {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": _job(job, cluster, k8s)}]


def _job(job: Job, cluster: Cluster, k8s: K8s) -> dict[str, Any]:
    many = {"completionMode": "Indexed", "completions": job.num_nodes, "parallelism": job.num_nodes}
    one = {"completions": 1, "parallelism": 1}
    template = {"metadata": {"labels": {"job-of": kubernetes_name(job)}}, "spec": _pod(job, cluster, k8s)}
    spec = {**(many if job.num_nodes > 1 else one), "backoffLimit": _retries(job) * job.num_nodes}  # all pods fail
    if _retries(job):
        codes = {"containerName": _RANKS, "operator": "In", "values": [EXIT_USER, EXIT_PREFLIGHT, EXIT_NO_RETRY]}
        spec["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    return {**spec, "template": template}


def _retries(job: Job) -> int:
    """How often a failed run is started again: a new pod resumes by itself."""
    return job.resolved.spec.retries if job.resolved else 0


def _command(job: Job, cluster: Cluster) -> list[str]:
    """What starts the ranks of a pod; with retries its exit code says whether another pod can help."""
    python = cluster.python or "python"
    words = torchrun_command(job, python)
    if not _retries(job):
        return words
    return ["sh", "-c", _ASK, "sh", python, str(job.folder.path), *words]


def _pod(job: Job, cluster: Cluster, k8s: K8s) -> dict[str, Any]:
    name, workdir = kubernetes_name(job), cluster.workdir or "/workspace"
    mounts: list[dict[str, Any]] = [{"name": "work", "mountPath": workdir}] if k8s.pvc else []
    mounts += [{"name": "shm", "mountPath": "/dev/shm"}, *(one.mount for one in k8s.volumes)]
    claim = {"name": "work", "persistentVolumeClaim": {"claimName": k8s.pvc}}
    volumes: list[dict[str, Any]] = [claim] if k8s.pvc else []
    volumes += [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": k8s.shm_size}},
        {"name": "written", "configMap": {"name": name}},
        *(one.volume for one in k8s.volumes),
    ]
    for number, mount in enumerate(cluster.mounts):
        source, target, *mode = mount.split(":")
        mounts.append({"name": f"host-{number}", "mountPath": target, **({"readOnly": True} if mode == ["ro"] else {})})
        volumes.append({"name": f"host-{number}", "hostPath": {"path": source}})
    ranks = {
        "name": _RANKS,
        "image": cluster.image,
        "command": [escape(word) for word in _command(job, cluster)],
        "workingDir": workdir,
        "env": _env(job, cluster),
        "resources": {"limits": _limits(job, k8s)},
        "volumeMounts": mounts,
    }
    copy = {
        "name": "written",
        "image": cluster.image,
        "command": ["sh", "-c", escape(_COPY), "sh", escape(str(job.folder.path))],
        "workingDir": workdir,
        "volumeMounts": [  # runs/ may be a volume of its own
            *(mount for mount in mounts if mount["name"] != "shm" and not mount["name"].startswith("host-")),
            {"name": "written", "mountPath": "/written"},
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "initContainers": [copy],
        "containers": [ranks],
        "volumes": volumes,
    }
    if job.num_nodes > 1:
        pod["subdomain"] = name
    if k8s.node_selector:
        pod["nodeSelector"] = dict(k8s.node_selector)
    if k8s.service_account:
        pod["serviceAccountName"] = k8s.service_account
    return pod


def _env(job: Job, cluster: Cluster) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"name": k, "value": escape(v)} for k, v in rank_environment(job, cluster).items()]
    if job.num_nodes > 1:  # torchrun reads its options from PET_*
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        meeting = {
            "PET_NNODES": str(job.num_nodes),
            "PET_MASTER_ADDR": f"{kubernetes_name(job)}-0.{kubernetes_name(job)}",
            "PET_MASTER_PORT": str(PORT),
        }
        rows += [{"name": key, "value": value} for key, value in meeting.items()]
        rows.append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}})
    return rows


def _limits(job: Job, k8s: K8s) -> dict[str, str]:
    limits = {"cpu": k8s.cpu, "memory": k8s.memory}
    if job.accelerator == "gpu":
        limits[k8s.gpu_resource] = str(job.devices)
    return {key: value for key, value in limits.items() if value is not None}


def escape(text: str) -> str:
    """Double every $: Kubernetes replaces $(NAME) in commands and values, and reads $$ as a plain $."""
    return text.replace("$", "$$")
