"""Name the corpus file that was cut off while a run read it: the process that reads it is killed by the system."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import DiagnosedError
from data.indexed import check_prefix
from data.manifest import SPLITS


@contextlib.contextmanager
def explain_cut_files(folders: Iterable[str]) -> Iterator[None]:
    """Replace an error inside this block by its cause, if a .bin file is no longer as long as its .idx says.

    The files are mapped into memory: a read beyond the new end is a SIGBUS. It ends a data worker, which torch reports
    as too little shared memory; it ends a rank that reads by itself at once, and then Python's fault handler prints
    where, and `launch.py diagnose` names the file.

    Args:
        folders: prepared corpora.

    Raises:
        DiagnosedError: a file was cut off.
    """
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    try:
        yield
    except RuntimeError as error:
        for problem in (one for folder in folders for split in SPLITS for one in check_prefix(Path(folder) / split)):
            raise DiagnosedError(
                f"{problem.what}, and was not when the run started",
                expected=problem.expected,
                found=problem.found,
                do="stop what writes to the file, bring it back from a copy or prepare the corpus again, then resume",
            ) from error
        raise
