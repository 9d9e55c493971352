"""`k8s`: a Job (one node) or an Indexed Job with a headless Service (several): one pod per node, torchrun in each."""

from __future__ import annotations

import logging
import re
import shlex
import time
from pathlib import Path
from typing import Any

import yaml

from common.errors import EXIT_INTERRUPTED, EXIT_RUN, UserError
from launcher.cluster_file import Cluster, K8s
from launcher.executors import Job
from launcher.executors.k8s_manifest import kubernetes_name, manifest
from launcher.executors.on_cluster import check_names

log = logging.getLogger("launch")
_POLL_S = 10.0


def submit(job: Job) -> int:
    """Write the manifest; without --dryrun create its objects, and (unless `wait: false`) wait for the Job's end.

    Returns:
        0, 1 if the Job failed, 130 if Ctrl-C ended the waiting (the Job continues).

    Raises:
        UserError: a cluster file without a k8s part, no client, no kubeconfig, or the API server's refusal.
    """
    cluster, k8s = check(job)
    objects = manifest(job, cluster, k8s)
    text = yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True)
    path = job.folder.path / "k8s.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if job.dryrun:
        log.info("k8s: would create %s:\n%s", path, text)
        return 0
    client = _connect(k8s)
    _create(client, objects, k8s)
    _log_submission(job, cluster, k8s, path)
    return _wait_for_end(client, kubernetes_name(job), k8s) if cluster.wait else 0


def check(job: Job) -> tuple[Cluster, K8s]:
    """The cluster and its Kubernetes part, if they allow the run.

    Raises:
        UserError: more than the cluster file allows, a file without a k8s part, or a name that Kubernetes cannot take.
    """
    cluster = check_names(job)
    if cluster.k8s is None or cluster.image is None:
        raise UserError(
            "the cluster file does not describe a Kubernetes cluster",
            expected="image, and a k8s part with pvc",
            found=f"image: {cluster.image}, k8s: {cluster.k8s}",
            do="--cluster docs/clusters/k8s.yaml, or a copy of it that describes your cluster",
        )
    kubernetes_name(job)
    return cluster, cluster.k8s


def _log_submission(job: Job, cluster: Cluster, k8s: K8s, path: Path) -> None:
    kubectl = ["kubectl", *(["--context", k8s.context] if k8s.context else []), "--namespace", k8s.namespace]
    name = kubernetes_name(job)
    log.info("submitted: Job %s (%s), %d pod(s) x %d rank(s)", name, path, job.num_nodes, job.devices)
    log.info(
        "logs:      %s; %s/%s on the claim",
        shlex.join([*kubectl, "logs", "-f", f"job/{name}"]),
        cluster.workdir,
        job.logs,
    )
    log.info("cancel:    %s", shlex.join([*kubectl, "delete", "job,service,configmap", "-l", f"job-of={name}"]))
    log.info("resume:    the cancel command first, then %s", job.resume_command)


def _connect(k8s: K8s) -> Any:
    """The official client, logged in as the kubeconfig says.

    Raises:
        UserError: the client is not installed, or the kubeconfig has no such context.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise UserError(
            "the Kubernetes client is not installed",
            expected="the package kubernetes",
            found="no such module",
            do="pip install kubernetes, or --dryrun --write and kubectl apply -f runs/NAME/k8s.yaml",
        ) from None
    try:
        config.load_kube_config(context=k8s.context)
    except config.ConfigException as problem:
        raise UserError(
            "no connection to the cluster",
            expected=f"a kubeconfig{f' with context {k8s.context}' if k8s.context else ''}",
            found=str(problem),
            do="set KUBECONFIG, or --dryrun --write and kubectl apply -f runs/NAME/k8s.yaml",
        ) from None
    return client


def _create(client: Any, objects: list[dict[str, Any]], k8s: K8s) -> None:
    """Create every object; if one is refused, delete those that were created before it."""
    core, batch = client.CoreV1Api(), client.BatchV1Api()
    calls = {
        "ConfigMap": (core.create_namespaced_config_map, core.delete_namespaced_config_map),
        "Service": (core.create_namespaced_service, core.delete_namespaced_service),
        "Job": (batch.create_namespaced_job, batch.delete_namespaced_job),
    }
    made: list[dict[str, Any]] = []
    for item in objects:
        try:
            calls[item["kind"]][0](k8s.namespace, item)
        except Exception as problem:  # ApiException, or urllib3's if the server does not answer
            for old in reversed(made):
                calls[old["kind"]][1](old["metadata"]["name"], k8s.namespace)
            raise _refusal(item, problem) from None
        made.append(item)


def _refusal(item: dict[str, Any], problem: Exception) -> UserError:
    name = item["metadata"]["name"]
    if getattr(problem, "status", None) == 409:
        do = f"kubectl delete job,service,configmap -l job-of={item['metadata']['labels']['job-of']}, or --name ANOTHER"
        return UserError(f"{item['kind']} {name} exists", expected="a name that is free", found="taken", do=do)
    said = re.sub(r"\s+", " ", str(getattr(problem, "body", None) or problem))
    do = "kubectl auth can-i create jobs; kubectl get events"
    return UserError(f"Kubernetes refused {item['kind']} {name}", expected="created", found=said[:500], do=do)


def _wait_for_end(client: Any, name: str, k8s: K8s) -> int:
    batch, last = client.BatchV1Api(), ""
    try:
        while True:
            status = batch.read_namespaced_job_status(name, k8s.namespace).status
            seen = f"{status.active or 0} active, {status.succeeded or 0} done, {status.failed or 0} failed"
            if seen != last:
                log.info("Job %s: pods %s", name, seen)
                last = seen
            for condition in status.conditions or []:
                if condition.status == "True" and condition.type in ("Complete", "Failed"):
                    return _report_end(client, name, k8s, condition)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        log.warning("waiting stopped; Job %s continues", name)
        return EXIT_INTERRUPTED


def _report_end(client: Any, name: str, k8s: K8s, condition: Any) -> int:
    if condition.type == "Complete":
        log.info("Job %s completed", name)
        return 0
    core = client.CoreV1Api()
    pods = core.list_namespaced_pod(k8s.namespace, label_selector=f"job-of={name}").items
    ended = [(state.terminated.finished_at, pod.metadata.name) for pod in pods for state in _failures(pod)]
    if ended:
        first = min(ended)[1]
        log.error("pod %s failed first:\n%s", first, core.read_namespaced_pod_log(first, k8s.namespace, tail_lines=60))
    log.error("Job %s failed: %s %s", name, condition.reason, condition.message)
    return EXIT_RUN


def _failures(pod: Any) -> list[Any]:
    statuses = pod.status.container_statuses or []
    return [s.state for s in statuses if s.state.terminated is not None and s.state.terminated.exit_code != 0]
