"""Environment sets: merge order, conditions, export to a real shell, files, and a VCCL that is one or is not."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from common.environment import show, vccl
from common.environment.known import KNOWN, explain
from common.environment.merge import (
    Site,
    apply_environment,
    complete_name,
    export_lines,
    parse_layers,
    resolve_environment,
)
from common.environment.sets import BASE, ONLY_IF, SETS, TIERS, TIMEOUT_KEY
from common.errors import UserError
from recipes import registry
from recipes.plan import Plan
from tests.common.environment import nccl_stub

ROOT = Path(__file__).resolve().parents[3]
gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="SKIPPED FOR LACK OF gcc: VCCL libraries are not built")


def _plan(**changes: Any) -> Plan:
    return dataclasses.replace(registry.resolve("qwen25_500m").plan, **changes)


def _values(name: str, plan: Plan | None = None, **environ: str) -> dict[str, tuple[str, str]]:
    return {s.key: (s.value, s.source) for s in resolve_environment(name, environ, plan) if not s.only_if}


def test_later_layers_win_and_the_user_last() -> None:
    assert _values("dual")[TIMEOUT_KEY] == ("600", "base")
    assert _values("dual+prod")[TIMEOUT_KEY] == ("1800", "prod") == _values("prod+dual")[TIMEOUT_KEY]
    assert _values("dual+prod", None, **{TIMEOUT_KEY: "77"})[TIMEOUT_KEY] == ("77", "user")


def test_a_set_does_not_hide_gpus_that_the_run_needs(tmp_path: Path) -> None:
    assert _values("dual", _plan(devices=2))["CUDA_VISIBLE_DEVICES"] == ("0,1", "dual")
    assert _values("dual", _plan(devices=4))["CUDA_VISIBLE_DEVICES"] == ("0,1,2,3", "dual")
    assert _values("official+lean", _plan(devices=2))["CUDA_VISIBLE_DEVICES"] == ("0,1", "lean")
    (tmp_path / "mine.env").write_text("CUDA_VISIBLE_DEVICES=3")
    mine = str(tmp_path / "mine.env")
    assert _values(f"dual+{mine}", _plan(devices=2))["CUDA_VISIBLE_DEVICES"] == ("3", mine)  # the user's own
    assert _values("official", _plan(devices=2))["CUDA_VISIBLE_DEVICES"] == ("0", "official")  # preflight refuses
    assert _values("cpu", _plan(devices=2, accelerator="cpu"))["CUDA_VISIBLE_DEVICES"] == ("", "cpu")


def test_every_variable_of_the_documents_has_a_verdict() -> None:
    tables = [BASE, *SETS.values(), *TIERS.values()]
    assert all(len(reason) > 10 for table in tables for _, reason in table.values())
    assert all(len(text) > 10 for _, text in KNOWN.values() if not text.startswith("as "))
    documented = (
        "NCCL_BUFFSIZE NCCL_P2P_LEVEL NCCL_CUMEM_HOST_ENABLE NCCL_CUMEM_POOL_SIZE NCCL_IB_GID_INDEX NCCL_IB_TIMEOUT "
        "NCCL_IB_AR_THRESHOLD NCCL_IB_QPS_PER_CONNECTION NCCL_TOPO_FILE NCCL_TOPO_VERBOSE NCCL_COMPRESSION "
        "NCCL_COMPRESSION_THRESHOLD ACCELERATE_USE_GLOO TORCHELASTIC_RUN_ID WANDB_PROJECT WANDB_API_KEY CUDA_HOME "
        "USE_LIBUV TORCHELASTIC_USE_AGENT_STORE MASTER_ADDR MASTER_PORT WORLD_SIZE PYTORCH_CUDA_ALLOC_CONF "
        "OMP_NUM_THREADS WANDB_MODE NCCL_PASS_SM NCCL_CUMEM_ENABLE NCCL_ENABLE_FAULT_TOLERANCE "
        "NCCL_TELEMETRY_ENABLE NCCL_PXN_DISABLE NCCL_IB_HCA NCCL_SHM_DISABLE NCCL_DEBUG LD_LIBRARY_PATH"
    )
    for key in documented.split():
        assert explain(key).known and explain(key).text, key
    assert explain("NCCL_COMPRESSION").since == "never" and explain("NCCL_P2P_LEVEL").since == "2.3.4"
    assert "max_split_size_mb" in explain("PYTORCH_CUDA_ALLOC_CONF").text
    assert not explain("NCCL_NO_SUCH_THING").known


def _shown(table: Table) -> dict[str, list[str]]:
    """The rows of a table by their first column."""
    rows = zip(*(list(column.cells) for column in table.columns), strict=True)
    return {str(row[0]): [str(cell) for cell in row[1:]] for row in rows}


def test_explain_shows_what_the_shell_sets_and_marks_the_unknown() -> None:
    environ = {"NCCL_FOO": "1", "CUDA_HOME": "/cuda", "HOME": "/root", "NCCL_BUFFSIZE": "1", "WORLD_SIZE": "2"}
    for name in (None, "lean"):
        found = _shown(show.settings_table(name, environ))
        assert {"NCCL_FOO", "CUDA_HOME", "NCCL_BUFFSIZE", "WORLD_SIZE"} <= set(found) and "HOME" not in found
        assert found["NCCL_FOO"][3].startswith("unknown") and found["NCCL_FOO"][1] == "user"
    assert _shown(show.variable_table("NCCL_P2P_LEVEL", {}))["NCCL_P2P_LEVEL"][:3] == ["(not set)", "", "2.3.4"]
    assert show.is_variable("NCCL_FOO") and not show.is_variable("dual") and not show.is_variable("multinode-ib")


@pytest.mark.parametrize(
    ("changes", "connections", "margin"),
    [
        ({}, False, False),
        ({"devices": 2}, False, True),
        ({"devices": 2, "tensor_parallel": 2}, True, False),
        ({"devices": 2, "context_parallel": 2}, True, False),
        ({"devices": 2, "pipeline_parallel": 2}, False, False),
        ({"devices": 4, "tensor_parallel": 2}, True, True),
    ],
)
def test_keys_for_a_parallelism_are_set_only_with_it(changes: dict[str, int], connections: bool, margin: bool) -> None:
    environ: dict[str, str] = {}
    apply_environment("multinode-ib", environ, _plan(**changes))
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in environ) == connections
    assert ("NVTE_FWD_LAYERNORM_SM_MARGIN" in environ) == margin
    environ.clear()
    apply_environment("official", environ, _plan(**changes))
    assert set(ONLY_IF) & set(SETS["official"]) <= set(environ)  # documented as it is, whatever the run


def test_threads_wait_awake_only_where_a_rank_is_alone() -> None:
    for ranks, yours, found in (
        (1, {}, {"GOMP_SPINCOUNT": "3000"}),
        (2, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (1, {"OMP_WAIT_POLICY": "PASSIVE"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
    ):
        environ = dict(yours)
        apply_environment("cpu", environ, _plan(devices=ranks))
        assert {key: environ[key] for key in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if key in environ} == found


def test_wrong_values_are_refused() -> None:
    for name, environ, text in (
        ("dual+dev+prod", {}, "two tiers"),
        ("dual", {TIMEOUT_KEY: "soon"}, "not a number of seconds"),
        ("dual", {TIMEOUT_KEY: "0"}, "not a number of seconds"),
        ("dual", {"CPT_PROCESS_GROUP_BACKEND": "mpi"}, "not a backend"),
        ("vccl", {"NCCL_ENABLE_FAULT_TOLERANCE": "1"}, "exclude each other"),
        ("vccl-ft", {}, "names of the NICs"),
        ("dual+./nowhere.env", {}, "cannot read"),
        ("", {}, "unknown environment set"),
    ):
        with pytest.raises(UserError, match=text):
            resolve_environment(name, environ)


def test_export_sets_the_same_values_in_a_real_shell(tmp_path: Path) -> None:
    nasty = "a b'; touch pwned; $(touch pwned) `touch pwned` \"#x"
    environ = {"PATH": os.environ["PATH"], "NCCL_DEBUG": nasty}
    text = "\n".join(export_lines(resolve_environment("dual+prod", environ)))
    shell = f"{text}\n{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    done = subprocess.run(["sh", "-c", shell], env={}, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert not (tmp_path / "pwned").exists()
    for s in resolve_environment("dual+prod", environ):
        assert found.get(s.key) == (None if s.only_if else s.value)
    file = tmp_path / "mine.env"
    file.write_text(text)
    with pytest.raises(UserError, match="mine.env:"):  # the nasty value has a $ in it: not read, not run
        parse_layers(str(file))
    file.write_text("\n".join(line for line in text.splitlines() if "NCCL_DEBUG" not in line))
    assert _values(f"lean+{file}")["OMP_NUM_THREADS"] == ("4", str(file))


@pytest.mark.parametrize(
    "line", ["rm -rf /", "export A=$HOME", "export A=`id`", "export A=b c", "A='b", "export A=b;id", "export A=b>x"]
)
def test_a_file_with_anything_but_plain_values_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.env").write_text(line + "\n")
    with pytest.raises(UserError, match="x.env:1"):
        parse_layers(str(tmp_path / "x.env"))


@gcc
def test_a_vccl_is_found_read_and_put_first(tmp_path: Path) -> None:
    target = nccl_stub.build(tmp_path)
    assert vccl.check_library(target) == vccl.Library(target, "2.26.6")
    environ = {"LD_LIBRARY_PATH": f"/usr/lib:{tmp_path}", "LD_PRELOAD": "libother.so"}
    found = {s.key: s for s in resolve_environment("vccl", environ)}
    assert found["LD_LIBRARY_PATH"].value == f"{tmp_path}:/usr/lib"
    assert found["LD_PRELOAD"].value == f"{target}:libother.so"
    assert "2.26.6" in found["LD_PRELOAD"].reason
    named = {s.key: s.value for s in resolve_environment("vccl", {"VCCL_LIBRARY": str(tmp_path)})}
    assert named["LD_PRELOAD"] == named["VCCL_LIBRARY"] == str(target)


@gcc
@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"own": False}, "plain NCCL, not VCCL"),
        ({"text": "2.21.5"}, "versions disagree"),
        ({"body": "__attribute__((constructor)) void f(void) { __builtin_trap(); }"}, "cannot be loaded"),
        ({"body": "extern int not_there(void); int f(void) { return not_there(); }"}, "cannot be loaded"),
    ],
)
def test_a_library_that_is_not_what_it_says_is_refused(kwargs: dict[str, Any], text: str, tmp_path: Path) -> None:
    target = nccl_stub.build(tmp_path, **kwargs)
    with pytest.raises(UserError, match=text):
        resolve_environment("vccl", {"VCCL_LIBRARY": str(target), "LD_BIND_NOW": "1"})
    with pytest.raises(UserError, match="no VCCL library found"):
        vccl.find_library({"LD_LIBRARY_PATH": str(tmp_path)})


def test_no_vccl(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").write_text("#!/bin/sh")
    for environ, text in (
        ({"VCCL_LIBRARY": str(tmp_path)}, "not a shared library"),
        ({"VCCL_LIBRARY": str(tmp_path / "nowhere")}, "no VCCL library found"),
    ):
        with pytest.raises(UserError, match=text):
            vccl.find_library(environ)


@gcc
def test_the_command_starts_again_with_the_library_mapped(tmp_path: Path) -> None:
    """A process cannot preload a library into itself; the second one has it, and starts only once."""
    target = nccl_stub.build(tmp_path)
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from common.environment import vccl
from common.environment.merge import apply_environment, restart_with_preloads
print("start", flush=True)
before = dict(os.environ)
restart_with_preloads(apply_environment("vccl", os.environ), before)
print(vccl.other_nccl_in_memory(os.environ["VCCL_LIBRARY"]), os.environ["NCCL_PASS_SM"], sys.argv[1:])
"""
    script = tmp_path / "command.py"
    script.write_text(code)
    environ = {"PATH": os.environ["PATH"], "VCCL_LIBRARY": str(tmp_path)}
    done = subprocess.run([sys.executable, script, "a b"], env=environ, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["start", "start", "None 1 ['a b']"], done.stderr
    assert vccl.other_nccl_in_memory(str(target)) is not None


RANK = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from common.environment import vccl
from common.errors import ProjectError
print("start", flush=True)
asked = vccl.asked_library(json.loads(sys.argv[1]))
vccl.start_again_with_vccl(asked, os.environ)
try:
    vccl.check_mapped(asked)
    print("loaded", os.environ["LD_PRELOAD"], os.environ.get("LD_LIBRARY_PATH", ""))
except ProjectError as problem:
    print(problem.what)
"""


def _rank(tmp_path: Path, library: str, **environ: str) -> list[str]:
    """What a rank prints whose env.json asks for this VCCL, without one of its variables in its environment."""
    rows = [
        dataclasses.asdict(s) for s in resolve_environment("vccl", {}, site=Site({"VCCL_LIBRARY": library}, "f", True))
    ]
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, str(script), json.dumps(rows)]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"], **environ}, capture_output=True, text=True)
    return done.stdout.splitlines()


@gcc
def test_a_rank_loads_the_vccl_of_its_own_machine(tmp_path: Path) -> None:
    """The launcher has never seen the file; the rank checks it, and starts again with it in front of the node's own."""
    (tmp_path / "lib").mkdir()
    real = nccl_stub.build(tmp_path / "lib")
    (tmp_path / "libnccl.so.2").symlink_to(real)
    for asked in (str(real), str(tmp_path / "lib"), str(tmp_path / "libnccl.so.2")):
        said = _rank(tmp_path, asked, LD_LIBRARY_PATH="/theirs")
        assert said == ["start", "start", f"loaded {real} {real.parent}:/theirs"]
    assert _rank(tmp_path, str(real), LD_PRELOAD=str(real), LD_LIBRARY_PATH="/theirs")[:1] == ["start"]


@gcc
def test_a_rank_without_the_asked_vccl_fails(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = nccl_stub.build(tmp_path / "plain", own=False)
    assert _rank(tmp_path, str(tmp_path / "nowhere")) == ["start", "no VCCL library found"]
    assert _rank(tmp_path, str(plain)) == ["start", f"{plain}: this is plain NCCL, not VCCL"]
    good = nccl_stub.build(tmp_path)
    said = _rank(tmp_path, str(good), LD_PRELOAD=f"{good}")  # already there: not started again
    assert said[0] == "start" and len(said) == 2 and said[1].startswith("loaded")


def test_vccl_on_other_machines_is_named_by_the_cluster_file(tmp_path: Path) -> None:
    site = Site({"VCCL_LIBRARY": "/opt/vccl/lib", "NCCL_IB_HCA": "mlx5_2:1"}, "c.yaml", elsewhere=True)
    environ = {"NCCL_IB_HCA": "mlx5_0:1"}
    found = {s.key: s for s in apply_environment("vccl-ft", environ, site=site)}
    assert found["VCCL_LIBRARY"].value == "/opt/vccl/lib" and "LD_PRELOAD" not in found
    assert environ["NCCL_IB_HCA"] == found["NCCL_IB_HCA"].value == "mlx5_2:1"  # which fault tolerance needs
    assert "overrules 'mlx5_0:1'" in found["NCCL_IB_HCA"].reason
    for site in (Site(elsewhere=True), Site({"VCCL_LIBRARY": "lib/libnccl.so.2"}, elsewhere=True)):
        with pytest.raises(UserError, match="is not said"):
            resolve_environment("vccl", {}, site=site)


def test_a_plus_adds_to_the_recipes_set() -> None:
    assert complete_name(None, "dual") == "dual"
    assert complete_name("gloo", "dual") == "gloo"
    assert complete_name("+gloo+prod", "dual") == "dual+gloo+prod"
    with pytest.raises(UserError, match="adds to the set of a recipe") as refused:
        resolve_environment("+prod", {})
    assert "env dual+prod" in refused.value.do


def test_every_set_that_is_advised_exists() -> None:
    """`--env +WORD` in errors, doctor, preflight and docs: typed as printed, it adds a set."""
    folders = ("launcher", "doctor", "recipes", "watch", "training", "common", "docs")
    files = [path for folder in folders for kind in ("*.py", "*.md", "*.yaml") for path in (ROOT / folder).rglob(kind)]
    advised = {word for path in files for word in re.findall(r"--env (\+[a-z][a-z+-]*\b)(?![./])", path.read_text())}
    assert {"+gloo", "+nccl-no-shm", "+prod"} <= advised
    for word in advised:
        parse_layers(complete_name(word, "dual"))


def test_the_page_lists_the_sets_as_they_are() -> None:
    """docs/environment.md holds what `launch.py env` prints; UPDATE_GOLDENS=1 writes it."""
    page = ROOT / "docs" / "environment.md"
    before, _, rest = page.read_text().partition("<!-- sets -->\n")
    table, _, after = rest.partition("<!-- end of sets -->\n")
    if os.environ.get("UPDATE_GOLDENS"):
        page.write_text(f"{before}<!-- sets -->\n{show.sets_markdown()}<!-- end of sets -->\n{after}")
        table = show.sets_markdown()
    assert table == show.sets_markdown()


def test_the_sets_are_recorded() -> None:
    """Every key, value and reason: changed on purpose only."""
    lines = []
    for name, table in [("base", BASE), *SETS.items(), *TIERS.items()]:
        lines += [f"{name}: {key}={value}  # {reason}" for key, (value, reason) in table.items()]
    golden = ROOT / "tests" / "goldens" / "env_sets.txt"
    text = "\n".join(lines) + "\n"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(text)
    assert golden.read_text() == text


def test_the_users_environment_wins_and_is_named() -> None:
    environ = {"NCCL_NVLS_ENABLE": "1"}
    settings = {s.key: s for s in apply_environment("official", environ)}
    assert environ["NCCL_NVLS_ENABLE"] == "1"
    assert settings["NCCL_NVLS_ENABLE"].source == "user"
    assert settings["CUDA_VISIBLE_DEVICES"].source == "official"
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_official_set_is_the_documented_one() -> None:
    assert {key: value for key, (value, _) in SETS["official"].items()} == {
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NVTE_DP_AMAX_REDUCE_INTERVAL": "0",
        "NVTE_ASYNC_AMAX_REDUCTION": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NVTE_FWD_LAYERNORM_SM_MARGIN": "16",
        "NVTE_BWD_LAYERNORM_SM_MARGIN": "16",
    }


def test_unknown_environment_set() -> None:
    with pytest.raises(UserError, match="oficial"):
        apply_environment("oficial", {})
