"""The version of this project: its number in pyproject.toml, and the commit that is checked out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def describe_version() -> str:
    """The number and the commit, for `launch.py --version`."""
    found = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    return f"{found[1] if found else 'unknown'} (commit {code_version()})"


def code_version() -> str:
    """The git commit of this checkout, `+changes` if edited, or `unknown` outside git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
