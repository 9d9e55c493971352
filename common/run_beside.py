"""Runs a Python program beside another process: at the lowest priority, and killed when that process ends.

`python -m common.run_beside PID PROGRAM.py ARGUMENTS`
"""

from __future__ import annotations

import os
import runpy
import sys

from common.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.nice(19)
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # noqa: PTH100, PTH120 - as Python does
    runpy.run_path(sys.argv[0], run_name="__main__")
