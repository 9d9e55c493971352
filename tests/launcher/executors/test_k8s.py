"""The Kubernetes manifest: valid by the official schemas, right in what they cannot see, created by the real client."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from common.errors import UserError
from launcher.cluster_file import Cluster, K8s
from launcher.executors import k8s as executor
from launcher.executors.k8s_manifest import manifest
from launcher.load_cluster import load_cluster
from tests.fork_server import python_path
from tests.launcher.executors import blended
from tests.launcher.executors.jobs import job

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "goldens" / "cluster" / "k8s.yaml"
FILE = load_cluster(ROOT / "docs" / "clusters" / "k8s.yaml")
VERSION = "1.34"


def _objects(nodes: int, tmp_path: Path, accelerator: str = "gpu", retries: int = 0) -> list[dict[str, Any]]:
    assert FILE.k8s is not None
    written = job(FILE, root=tmp_path / "runs", num_nodes=nodes, accelerator=accelerator, retries=retries)
    written.folder.path.mkdir(parents=True, exist_ok=True)
    written.folder.spec_file.write_text('{"recipe": "qwen25_tiny"}\n')
    written.folder.env.write_text("[]\n")
    relative = job(FILE, num_nodes=nodes, accelerator=accelerator)
    objects = manifest(written, FILE, FILE.k8s)
    text = json.dumps(objects).replace(str(written.folder.path), str(relative.folder.path))
    found: list[dict[str, Any]] = json.loads(text)
    return found


def _problems(objects: list[dict[str, Any]]) -> list[str]:
    """What the API server or the kubelet would refuse, or run otherwise than meant, and no schema sees."""
    by_kind = {item["kind"]: item for item in objects}
    batch = by_kind["Job"]
    pod = batch["spec"]["template"]["spec"]
    labels = batch["spec"]["template"]["metadata"]["labels"]
    volumes = [volume["name"] for volume in pod["volumes"]]
    found = []
    for container in [*pod["initContainers"], *pod["containers"]]:
        mounts = container["volumeMounts"]
        found += [f"no volume {mount['name']}" for mount in mounts if mount["name"] not in volumes]
        paths = [mount["mountPath"] for mount in mounts]
        found += ["mounted twice"] if len(set(paths)) != len(paths) else []
        names = [row["name"] for row in container.get("env", [])]
        found += ["set twice"] if len(set(names)) != len(names) else []
    ranks = pod["containers"][0]
    env = {row["name"]: row.get("value", "") for row in ranks["env"]}
    nodes = batch["spec"]["completions"]
    found += ["pods wait for each other"] if batch["spec"]["parallelism"] != nodes else []
    found += ["a Job's pods may not be restarted Always"] if pod["restartPolicy"] not in ("Never", "OnFailure") else []
    maps = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    found += [f"no ConfigMap {name}" for name in maps if name != by_kind["ConfigMap"]["metadata"]["name"]]
    found += (
        ["/dev/shm is the runtime's 64 MB"] if "/dev/shm" not in [m["mountPath"] for m in ranks["volumeMounts"]] else []
    )
    found += ["spaces differ"] if len({item["metadata"]["namespace"] for item in objects}) != 1 else []
    if nodes > 1:
        service = by_kind["Service"]
        found += ["not indexed"] if batch["spec"].get("completionMode") != "Indexed" else []
        found += ["the Service finds no pod"] if not service["spec"]["selector"].items() <= labels.items() else []
        found += ["the Service is not headless"] if service["spec"]["clusterIP"] != "None" else []
        found += ["pods have no name in DNS"] if pod.get("subdomain") != service["metadata"]["name"] else []
        first = f"{batch['metadata']['name']}-0.{service['metadata']['name']}"
        found += ["ranks meet nowhere"] if env.get("PET_MASTER_ADDR") != first else []
        found += ["ranks wait for others"] if env.get("PET_NNODES") != str(nodes) else []
        index = [row for row in ranks["env"] if row["name"] == "PET_NODE_RANK"][0]["valueFrom"]["fieldRef"]["fieldPath"]
        found += ["every pod is node 0"] if "job-completion-index" not in index else []
        found += ["DNS only after readiness"] if not service["spec"].get("publishNotReadyAddresses") else []
        found += ["name too long for a pod"] if len(batch["metadata"]["name"]) > 57 else []
    return found


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("accelerator", ["gpu", "cpu"])
def test_valid(nodes: int, accelerator: str, tmp_path: Path) -> None:
    objects = _objects(nodes, tmp_path, accelerator)
    assert [item["kind"] for item in objects] == ["ConfigMap", *(["Service"] if nodes > 1 else []), "Job"]
    for item in objects:
        kubernetes_validate.validate(item, VERSION, strict=True)
    assert _problems(objects) == []
    limits = objects[-1]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert ("nvidia.com/gpu" in limits) == (accelerator == "gpu")


NFS = {"name": "runs", "mountPath": "/workspace/runs", "nfs": {"server": "nas.example", "path": "/export/runs"}}
CLAIM = {"name": "data", "mountPath": "/data", "readOnly": True, "persistentVolumeClaim": {"claimName": "corpora"}}


@pytest.mark.parametrize(
    "part", ({"pvc": "qwen25", "volumes": [NFS, CLAIM]}, {"volumes": [{**NFS, "mountPath": "/workspace"}, CLAIM]})
)
def test_nfs_and_other_volumes(part: dict[str, Any], tmp_path: Path) -> None:
    """Every container sees them at their path, as the API's own schema has them; one of them can hold the checkout."""
    cluster = Cluster.model_validate({"image": "i", "workdir": "/workspace", "k8s": part})
    assert cluster.k8s is not None
    written = job(cluster, root=tmp_path / "runs")
    written.folder.path.mkdir(parents=True)
    objects = manifest(written, cluster, cluster.k8s)
    for item in objects:
        kubernetes_validate.validate(item, VERSION, strict=True)
    assert _problems(objects) == []
    pod = _pod(objects)
    assert {"name": "runs", "nfs": NFS["nfs"]} in pod["volumes"]
    for container in (*pod["initContainers"], *pod["containers"]):
        mounts = container["volumeMounts"]
        assert {"name": "runs", "mountPath": part["volumes"][0]["mountPath"]} in mounts
        assert {"name": "data", "mountPath": "/data", "readOnly": True} in mounts
        assert "/workspace" in [mount["mountPath"] for mount in mounts]


@pytest.mark.parametrize(
    ("k8s", "words"),
    (
        ({}, "no volume holds the checkout"),
        ({"pvc": "a", "volumes": [{"name": "x", "mountPath": "/x"}]}, "a volume has one source"),
        ({"pvc": "a", "volumes": [{**NFS, "emptyDir": {}}]}, "a volume has one source"),
        ({"pvc": "a", "volumes": [{**NFS, "name": "shm"}]}, "take another name"),
        ({"pvc": "a", "volumes": [{**NFS, "mountPath": "runs"}]}, "mount_path"),
        ({"pvc": "a", "volumes": [{**NFS, "nsf": {}}]}, "nsf"),
    ),
)
def test_wrong_volumes(k8s: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"image": "i", "workdir": "/workspace", "k8s": k8s}))
    with pytest.raises(UserError, match=words) as error:
        load_cluster(tmp_path / "c.yaml")
    assert error.value.do


@pytest.mark.nemo
def test_the_pods_command_makes_one_world_of_two_nodes(tmp_path: Path) -> None:
    """torchrun takes its place and meeting point from the manifest's PET_* variables (DNS replaced by loopback)."""
    ranks = _pod(_objects(2, tmp_path))["containers"][0]
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "__init__.py").touch()  # found before the real package, wherever that is
    (tmp_path / "launcher" / "rank_main.py").write_text(  # one write a rank: what two ranks print must not mix
        "import os, sys\nsys.stdout.write('{RANK} {WORLD_SIZE}\\n'.format(**os.environ))\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for node in range(2):
        env = {**os.environ, **{row["name"]: row["value"] for row in ranks["env"] if "value" in row}}
        env.update(PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=str(port), PET_NODE_RANK=str(node), OMP_NUM_THREADS="1")
        command = [sys.executable, *ranks["command"][1:]]
        started.append(subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=60)[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sorted(rank for row in said for rank in row[::2]) == ["0", "1", "2", "3"]
    assert {size for row in said for size in row[1::2]} == {"4"}


@pytest.mark.parametrize("retries", [0, 3])
def test_manifest_is_the_recorded_one(retries: int, tmp_path: Path) -> None:
    objects, golden = _objects(2, tmp_path, retries=retries), GOLDEN
    if retries:
        objects, golden = objects[-1:], GOLDEN.with_name("k8s-retries.yaml")  # the Job
        kubernetes_validate.validate(objects[0], VERSION, strict=True)
    text = yaml.safe_dump_all(objects, sort_keys=False)
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text()


_PYTHON = """#!/bin/sh
case "$*" in *watch.retry_helps*) echo "$@" > asked; exit $ANSWER ;; esac
trap 'exit 7' TERM
touch started
[ "$CODE" ] && exit $CODE
while true; do sleep 0.02; done
"""


@pytest.mark.parametrize(("code", "answer", "ends"), [("1", 4, 4), ("1", 0, 1), ("1", 1, 1), ("0", 4, 0), ("", 4, 7)])
def test_a_pod_says_whether_another_one_can_help(code: str, answer: int, ends: int, tmp_path: Path) -> None:
    """With retries; what starts the ranks gets the pod's SIGTERM (the last row), and then nobody is asked."""
    (tmp_path / "python").write_text(_PYTHON)
    (tmp_path / "python").chmod(0o755)
    command = [word.replace("$$", "$") for word in _pod(_objects(1, tmp_path, retries=2))["containers"][0]["command"]]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": code, "ANSWER": str(answer)}
    pod = subprocess.Popen(command, cwd=tmp_path, env=env)
    if not code:
        while not (tmp_path / "started").exists():
            assert pod.poll() is None
        pod.terminate()
    assert pod.wait(timeout=30) == ends
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked == ("-m watch.retry_helps runs/my-run 1\n" if code == "1" else "")


def _pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = objects[-1]["spec"]["template"]["spec"]
    return pod


FAULTS: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "misspelt field": lambda o: _pod(o).update(restartPolcy="Never"),
    "text for a number": lambda o: o[-1]["spec"].update(backoffLimit="0"),
    "restart Always": lambda o: _pod(o).update(restartPolicy="Always"),
    "volume away": lambda o: _pod(o)["volumes"].pop(0),
    "shm away": lambda o: _pod(o)["containers"][0]["volumeMounts"].pop(1),
    "selector": lambda o: o[1]["spec"]["selector"].update({"job-of": "other"}),
    "subdomain": lambda o: _pod(o).pop("subdomain"),
    "not headless": lambda o: o[1]["spec"].update(clusterIP="10.0.0.1"),
    "parallelism": lambda o: o[-1]["spec"].update(parallelism=1),
    "not indexed": lambda o: o[-1]["spec"].pop("completionMode"),
    "config map": lambda o: o[0]["metadata"].update(name="other"),
    "namespace": lambda o: o[0]["metadata"].update(namespace="other"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checks_see_planted_faults(fault: str, tmp_path: Path) -> None:
    objects = copy.deepcopy(_objects(2, tmp_path))
    FAULTS[fault](objects)
    try:
        for item in objects:
            kubernetes_validate.validate(item, VERSION, strict=True)
    except kubernetes_validate.ValidationError:
        return
    assert _problems(objects)


class _Api(BaseHTTPRequestHandler):
    """As much of an API server as the client asks for; `server.end` says how the Job ends."""

    server: Any

    def _answer(self, code: int, body: Any) -> None:
        text = json.dumps(body).encode() if not isinstance(body, str) else body.encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json" if not isinstance(body, str) else "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["kind"] == self.server.refuse:
            self._answer(self.server.code, {"kind": "Status", "code": self.server.code, "message": "exceeded quota"})
            return
        self.server.seen[body["kind"]] = (self.path, body)
        self._answer(201, body)

    def do_DELETE(self) -> None:  # noqa: N802
        self.server.deleted.append(self.path)
        self._answer(200, {"kind": "Status"})

    def do_GET(self) -> None:  # noqa: N802
        if "/log" in self.path:
            self._answer(200, "RuntimeError: rank 1 has no data\n")
        elif "/pods" in self.path:
            state = {"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T00:00:00Z"}}
            status = {
                "containerStatuses": [
                    {"name": "r", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}
                ]
            }
            self._answer(200, {"kind": "PodList", "items": [{"metadata": {"name": "my-run-1-x"}, "status": status}]})
        else:
            condition = {"type": self.server.end, "status": "True", "reason": "BackoffLimitExceeded", "message": "m"}
            self._answer(200, {"kind": "Job", "metadata": {"name": "my-run"}, "status": {"conditions": [condition]}})

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    server.seen, server.deleted, server.end, server.refuse, server.code = {}, [], "Complete", "", 403
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()


def test_created_and_waited_for(api: Any) -> None:
    assert executor.submit(job(FILE, num_nodes=2, dryrun=False)) == 0
    assert set(api.seen) == {"ConfigMap", "Service", "Job"}
    path, body = api.seen["Job"]
    assert path == "/apis/batch/v1/namespaces/training/jobs"
    assert body == list(yaml.safe_load_all(Path("runs/my-run/k8s.yaml").read_text()))[-1]


def _play_pod(pod: dict[str, Any], files: dict[str, str], claim: Path, folder: Path) -> None:
    """Run what the pod runs, with `claim` where it mounts the claim and this Python in place of the image's."""
    written = folder / "written"
    written.mkdir()
    for name, text in files.items():
        (written / name).write_text(text)
    env = {**os.environ, "HOSTNAME": "pod", "PYTHONPATH": python_path(ROOT)}
    copy = [word.replace("$$", "$").replace("/written/", f"{written}/") for word in pod["initContainers"][0]["command"]]
    subprocess.run(copy, cwd=claim, env=env, check=True)
    ranks = pod["containers"][0]
    env |= {row["name"]: row["value"].replace("$$", "$") for row in ranks["env"]}
    done = subprocess.run(
        [sys.executable, *ranks["command"][1:]], cwd=claim, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nemo
def test_a_blend_that_only_the_claim_holds(api: Any, sample: Path, tmp_path: Path) -> None:
    """Submitted from a folder without corpora and base; checked, read and recorded in the pod."""
    claim, here = tmp_path / "claim", tmp_path / "here"
    here.mkdir()
    blended.place_data(claim, sample)
    (here / "cluster.yaml").write_text(yaml.safe_dump({"image": "i:1", "workdir": "/workspace", "k8s": {"pvc": "c"}}))
    start = [sys.executable, str(ROOT / "launch.py"), "--recipe", blended.RECIPE, "--name", "far"]
    words = ["--executor", "k8s", "--cluster", "cluster.yaml", *blended.WORDS]
    done = subprocess.run([*start, *words], cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    files = api.seen["ConfigMap"][1]["data"]
    assert set(files) == {"spec.json", "config.yaml", "env.json", "command.txt", "version.txt", "run.yaml"}
    _play_pod(api.seen["Job"][1]["spec"]["template"]["spec"], files, claim, tmp_path)
    blended.check_records(claim / "runs" / "far")
    blended.check_passport(claim / "runs" / "far", here)


def test_failure_shows_the_pod_that_failed(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    api.end = "Failed"
    assert executor.submit(job(FILE, num_nodes=2, dryrun=False)) == 1
    assert "my-run-1-x failed first" in caplog.text and "rank 1 has no data" in caplog.text


@pytest.mark.parametrize(("code", "words"), [(403, "exceeded quota"), (409, "exists")])
def test_refusals_leave_nothing_behind(api: Any, code: int, words: str) -> None:
    api.refuse, api.code = "Job", code
    with pytest.raises(UserError, match=words):
        executor.submit(job(FILE, num_nodes=2, dryrun=False))
    assert [path.rsplit("/", 2)[-2] for path in api.deleted] == ["services", "configmaps"]


def test_dry_run_creates_nothing(api: Any) -> None:
    assert executor.submit(job(FILE, dryrun=True)) == 0
    assert not api.seen and Path("runs/my-run/k8s.yaml").exists()


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="does not describe a Kubernetes cluster"):
        executor.submit(job(Cluster(devices_per_node=2)))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no connection to the cluster"):
        executor.submit(job(FILE, dryrun=False))
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(UserError, match="client is not installed"):
        executor.submit(job(FILE, dryrun=False))


def test_names() -> None:
    from launcher.executors.k8s_manifest import kubernetes_name

    assert kubernetes_name(job(None, "My_run.2")) == "my-run-2"
    assert kubernetes_name(job(None, "123.")) == "run-123"  # a Service's name begins with a letter
    assert K8s(pvc="c").shm_size == "16Gi"
