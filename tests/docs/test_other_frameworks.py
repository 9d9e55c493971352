"""docs/other-frameworks.md, followed on a CPU: the printed set in a shell, and two ranks of DDP and Accelerate."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.fork_server import real_start

pytestmark = pytest.mark.nemo


@pytest.mark.parametrize(
    ("example", "said"),
    (("ddp.py", "2 ranks on gloo: weight 3.0"), ("accelerate_train.py", "2 ranks: weight 3.0")),
)
def test_two_ranks_with_the_printed_set(example: str, said: str, tmp_path: Path) -> None:
    if "accelerate" in example and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    page = (ROOT / "docs/other-frameworks.md").read_text()
    assert f"torchrun --nproc-per-node 2 docs/examples/{example}" in page
    python = shlex.quote(sys.executable)
    start = f"{python} -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2"
    script = f'set -e; eval "$({python} launch.py env cpu --export)"; test -z "$CUDA_VISIBLE_DEVICES"; '
    done = subprocess.run(
        ["bash", "-c", f"{script} exec {start} docs/examples/{example}"],
        cwd=ROOT,
        env=real_start(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert said in done.stdout
