"""Hostile text in cluster files and names: refused, or it arrives as the same text; nothing of it is executed."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from launcher.cluster_file import Cluster, K8s
from launcher.executors.docker import container_script, docker_run_command
from launcher.executors.k8s_manifest import manifest
from launcher.executors.on_cluster import check_names, rank_environment, workdir_on_nodes
from launcher.executors.slurm_render import render
from launcher.load_cluster import load_cluster
from tests.launcher.executors.jobs import job

COUNTED = {"accepted": 0, "refused": 0}
PAYLOADS = (
    "$(touch canary)", "`touch canary`", "; touch canary", "'; touch canary; '", '"; touch canary; "', "x' \"y",
    "&& touch canary", "| touch canary", "\ntouch canary\n", "\n#SBATCH --wrap=x", "$(touch${IFS}canary)", ">canary",
    "a b", "$HOME", "%j", "\\", "*", "~", "-x", "--wrap=x", "ü", "名", "\u2028touch canary", "\u202e", "é\u0301",
    "\x00", "\ud800", "{{7*7}}",
)  # fmt: skip
_pieces = st.one_of(st.sampled_from(PAYLOADS), st.text(max_size=8), st.sampled_from(["a", "/a", "gpu", "--x="]))
hostile = st.lists(_pieces, min_size=1, max_size=4).map("".join)
plain = st.sampled_from(["gpu", "a_b", "x1", "A.b-c"])
names = st.one_of(plain, plain, plain, hostile)
path = st.one_of(st.just("/work"), hostile.map(lambda text: "/" + text))
FILES = st.fixed_dictionaries(
    {},
    optional={
        "account": st.one_of(plain, hostile),
        "partition": st.one_of(plain, hostile),
        "image": st.one_of(st.just("nvcr.io/nvidia/nemo:25.04"), hostile),
        "mounts": st.lists(st.builds("{}:{}".format, path, path), max_size=2),
        "python": st.one_of(st.just("/opt/my python/bin/python"), hostile),
        "env": st.dictionaries(st.one_of(st.just("no_proxy"), st.just("A"), hostile), hostile, max_size=3),
        "slurm": st.fixed_dictionaries(
            {},
            optional={
                "sbatch": st.dictionaries(st.one_of(st.just("qos"), hostile), st.one_of(plain, hostile), max_size=2),
                "srun": st.lists(hostile.map(lambda text: "--x=" + text), max_size=2),
            },
        ),
    },
)
STUB = """#!/bin/bash
{ printf '%s\\0' "$@"; printf '\\n--\\n\\0'; } >> "$STUB_OUT/$(basename "$0").argv"
env -0 > "$STUB_OUT/$(basename "$0").env"
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    for name in ("srun", "scontrol", "sbatch", "docker", "python"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    return folder


def _run(text: str, stubs: Path) -> tuple[Path, list[list[str]], dict[str, str]]:
    """Run a script in an empty folder; every call of srun or docker, and the environment of the last."""
    folder = Path(tempfile.mkdtemp(prefix="quoting-"))
    (folder / "in").mkdir()
    (folder / "out").mkdir()
    environ = {"PATH": f"{stubs}:/usr/bin:/bin", "STUB_OUT": str(folder / "out"), "SLURM_JOB_ID": "7", "HOME": "/h"}
    subprocess.run(["bash", "-c", text], cwd=folder / "in", env=environ, capture_output=True, timeout=20)
    calls: list[list[str]] = []
    found: dict[str, str] = {}
    for name in ("srun", "docker"):
        file = folder / "out" / f"{name}.argv"
        if file.exists():
            blocks = os.fsdecode(file.read_bytes()).split("\0\n--\n\0")[:-1]
            calls = [block.split("\0") for block in blocks]
            rows = os.fsdecode((folder / "out" / f"{name}.env").read_bytes()).split("\0")
            found = dict(row.split("=", 1) for row in rows if "=" in row)
    assert not list((folder / "in").iterdir()), f"a file was made by {text}"
    return folder, calls, found


def _accepted(rows: Any, tmp: Path) -> Cluster | None:
    file = tmp / "cluster.yaml"
    try:
        file.write_text(yaml.safe_dump(rows, allow_unicode=True), encoding="utf-8")
    except UnicodeEncodeError:
        file.write_text(yaml.safe_dump(rows), encoding="utf-8")
    try:
        return load_cluster(file)
    except UserError:
        return None


def _slurm(cluster: Cluster, name: str, stubs: Path) -> None:
    text = render(job(cluster, name, env={"A_b": "x; touch canary '\""}), cluster, f"runs/{name}/slurm")
    _, calls, environ = _run(text, stubs)
    words = calls[-1]
    assert words[-4:] == [cluster.python or words[-4], "-m", "launcher.rank_main", f"runs/{name}"]
    assert [word for word in words if word.startswith("--x=")] == cluster.slurm.srun
    wanted = rank_environment(job(cluster, name, env={"A_b": "x; touch canary '\""}), cluster)
    assert {key: environ[key] for key in wanted} == wanted
    if cluster.image:
        assert f"--container-image={cluster.image}" in words
        assert "--container-mounts=" + ",".join([f"{Path.cwd()}:{Path.cwd()}", *cluster.mounts]) in words
    else:
        assert not [word for word in words if word.startswith("--container")]
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    known = {"account", "gpus-per-node", "job-name", "nodes", "ntasks-per-node", "open-mode", "output", "partition"}
    assert {line.split("--")[1].split("=")[0] for line in directives} <= known | set(cluster.slurm.sbatch)


def _docker(cluster: Cluster, name: str, stubs: Path) -> None:
    words = docker_run_command(job(cluster, name), cluster)
    _, calls, _ = _run(shlex.join(words), stubs)
    assert calls == [words[1:]]
    inner = (
        container_script(job(cluster, name), cluster)
        .replace("/nemo_run", "/nonexistent")
        .replace("cd /workspace", "cd .")
    )
    _run(inner, stubs)


def _k8s(cluster: Cluster, name: str) -> None:
    k8s = K8s(pvc="claim")
    full = cluster.model_copy(update={"k8s": k8s, "image": cluster.image or "image:1"})
    try:
        objects = manifest(job(full, name), full, k8s)
    except UserError:
        return
    text = yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True)
    assert list(yaml.safe_load_all(text)) == objects
    container = objects[-1]["spec"]["template"]["spec"]["containers"][0]
    arrived = {row["name"]: row["value"].replace("$$", "$") for row in container["env"]}
    assert arrived == rank_environment(job(full, name), full)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rows=FILES, name=names)
def test_hostile_files(stubs: Path, tmp_path: Path, rows: dict[str, Any], name: str) -> None:
    cluster = _accepted(rows, tmp_path)
    if cluster is None:
        COUNTED["refused"] += 1
        return
    try:
        check_names(job(cluster, name, devices=1))
    except UserError:
        COUNTED["refused"] += 1
        return
    COUNTED["accepted"] += 1
    _slurm(cluster, name, stubs)
    _docker(cluster, name, stubs)
    _k8s(cluster, name)


@pytest.mark.slow
def test_both_happened() -> None:
    """A fuzz test in which every file is refused, or none, has shown nothing."""
    print(COUNTED)
    assert COUNTED["accepted"] >= 20 and COUNTED["refused"] >= 20


@pytest.mark.parametrize("text", [p for p in PAYLOADS if not set(p) & set("\x00\ud800\n\u2028%\\")])
def test_every_payload_as_a_value(stubs: Path, tmp_path: Path, text: str) -> None:
    """Each one, in each place that takes any text, is accepted and arrives whole."""
    cluster = _accepted(
        {
            "env": {"A": text},
            "python": f"/p{text}",
            "slurm": {"srun": [f"--x={text}"]},
            "image": "i",
            "mounts": [f"/m{text}:/n"],
        },
        tmp_path,
    )
    assert cluster is not None
    _slurm(cluster, "run", stubs)
    _docker(cluster, "run", stubs)
    _k8s(cluster, "run")


def test_folder_with_what_slurm_expands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a%j").mkdir()
    monkeypatch.chdir(tmp_path / "a%j")
    with pytest.raises(UserError, match="cannot be given to a scheduler"):
        workdir_on_nodes(Cluster())


@pytest.mark.nemo  # the tunnel is NeMo-Run's
def test_sbatch_gets_whole_words(stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with spaces, quotes and a command in its name, through the real tunnel."""
    from launcher.executors.slurm import _run_sbatch
    from launcher.executors.tunnel import open_tunnel

    folder = tmp_path / "it's; touch canary $(touch canary)"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{stubs}:/usr/bin:/bin")
    monkeypatch.setenv("STUB_OUT", str(tmp_path))
    cluster = Cluster()
    with pytest.raises(UserError, match="Slurm refused"):  # the stub gives no job id
        _run_sbatch(open_tunnel(cluster), cluster, "runs/my-run/slurm/my-run.sbatch")
    words = os.fsdecode((tmp_path / "sbatch.argv").read_bytes()).split("\0")
    assert words[:4] == ["--parsable", "--requeue", "--chdir", str(folder)]
    assert not list(folder.iterdir())
