"""Real ranks on Gloo (torch only): a rank that differs, is lost or is stuck is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.machine_facts import find_free_port
from tests.fork_server import python_path

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).resolve().parents[3]
RANK = """# served
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from training.distributed import consistency, lost_ranks
from common.commands import set_resume_command
from common.errors import ProjectError

odd = json.loads(sys.argv[1]) if os.environ["RANK"] == sys.argv[2] else {}
facts, clock = consistency.collect_facts, time.time
consistency.collect_facts = lambda: {**facts(), **odd.get("facts", {})}
if "clock" in odd:
    consistency.time.time = lambda: clock() + odd["clock"]
set_resume_command("python launch.py resume mine")
lost_ranks.set_collective_timeout()
dist.init_process_group("gloo")
group = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))  # as Megatron makes its own
try:
    consistency.record_run_facts(odd.get("config", "a: 1"), {})
    with lost_ranks.explain_failed_collectives(print):
        consistency.check_ranks()
        print("alike", os.getpid(), flush=True)
        for step in range(10**6 if len(sys.argv) > 3 else 3):
            dist.all_reduce(torch.ones(4), group=group)
            lost_ranks.record_step()
            time.sleep(0.01)
    print("done", flush=True)
except ProjectError as error:
    print(error.explain(), flush=True)
    os._exit(error.exit_code)
"""


def _start(
    odd: dict[str, Any], odd_rank: int, world: int, *words: str, script: str = RANK, **environ: str
) -> list[subprocess.Popen[str]]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port(100, 29700)), "WORLD_SIZE": str(world)}
    variables |= {
        "PYTHONPATH": python_path(ROOT),
        "OMP_NUM_THREADS": "1",
        "CPT_PROCESS_GROUP_TIMEOUT_S": "5",
        **environ,
    }
    variables |= environ
    command = [sys.executable, "-W", "ignore", "-c", script, json.dumps(odd), str(odd_rank), *words]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def _outputs(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        return [(rank.returncode, text) for rank in ranks for text in [rank.communicate(timeout=240)[0]]]
    finally:
        for rank in ranks:
            rank.kill()


def _pid(rank: subprocess.Popen[str]) -> int:
    """Of the process that computes, which it prints: the started one may have handed itself over."""
    assert rank.stdout
    return int(rank.stdout.readline().split()[1])


def test_equal_ranks_train() -> None:
    for code, text in _outputs(_start({}, 0, 2)):
        assert (code, "done" in text) == (0, True), text


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"facts": {"torch": "2.1.0"}}, "not alike: torch"),
        ({"facts": {"code": "deadbeef+changes", "python": "3.8.1"}}, "not alike: code, python"),
        ({"config": "a: 2"}, "not alike: configuration"),
        ({"clock": 3600.0}, "clocks of the ranks disagree"),
        ({"clock": -3600.0}, "clocks of the ranks disagree"),
    ],
)
def test_all_three_ranks_name_the_one_that_differs(odd: dict[str, Any], words: str) -> None:
    for code, text in _outputs(_start(odd, 1, 3)):
        assert code == 3, text
        assert words in text
        assert "rank 1 on " in text and "rank 2 on" not in text and "rank 0 on" not in text


@pytest.mark.parametrize(
    ("kill", "words"),
    [(signal.SIGKILL, "its process is gone"), (signal.SIGSTOP, "its process is stuck")],
)
def test_a_lost_rank_is_named_within_the_timeout(kill: signal.Signals, words: str) -> None:
    """Megatron sets 30 minutes for its groups: the environment's five seconds replace them."""
    ranks = _start({}, 0, 2, "long")
    assert ranks[0].stdout and "alike" in ranks[0].stdout.readline()
    lost = _pid(ranks[1])
    time.sleep(1)
    os.kill(lost, kill)
    start = time.monotonic()
    code = ranks[0].wait(timeout=5 + 8)
    text = ranks[0].stdout.read()
    ranks[1].kill()
    assert code == 1, text
    assert "then continue: python launch.py resume mine\n" in text
    assert time.monotonic() - start < 5 + 8
    assert "lost rank 1 on " in text and words in text


def test_the_watch_ends_a_rank_that_gets_no_exception() -> None:
    """With NCCL a lost rank raises no exception: the main thread waits for ever."""
    quiet = RANK.replace(
        "for step in range", "dist.get_backend = lambda: 'nccl'; time.sleep(600)\n        for step in range"
    )
    ranks = _start({}, 0, 2, script=quiet)
    assert ranks[0].stdout and "alike" in ranks[0].stdout.readline()
    os.kill(_pid(ranks[1]), signal.SIGKILL)
    assert ranks[0].wait(timeout=5 + 5) == 1
    assert "lost rank 1 on " in ranks[0].stdout.read()


def test_a_wrong_vccl_is_refused_at_the_start() -> None:
    wanted = {"VCCL_LIBRARY": "/opt/vccl/lib/libnccl.so.2", "LD_PRELOAD": "/opt/vccl/lib/libnccl.so.2"}
    for code, text in _outputs(_start({}, 0, 1, **wanted)):
        assert code == 3 and "VCCL is not loaded in this rank" in text, text
