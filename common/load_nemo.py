"""The import of NeMo as every training and benchmark does it: only what a run needs, and silent on the console."""

from __future__ import annotations

import logging
import sys

from common import lazy_imports

log = logging.getLogger("launch")


def load_nemo() -> None:
    """Import what a run needs of NeMo, say what the wait is for, and keep NeMo's lines off the console.

    What NeMo imports and a run does not use is loaded on first use (common/lazy_imports.py). Lightning no longer asks
    MPI for ranks: a run has them in torchrun's variables (training/distributed/rank_env.py), and MPI_Init, which is
    called where mpi4py is installed, takes 0.6 s and can end the process.

    NeMo's logger prints to the console as soon as it exists, and shows Python's warnings as `[NeMo W ...]`. So its
    console handlers go before the rest of NeMo is imported. Its lines go to its own file in the run's log folder (it
    adds that file when a run starts), and warnings and Lightning's lines to this project's log files.
    """
    if "nemo.collections.llm" not in sys.modules:
        log.info("loading NeMo (about 10 s)")
    lazy_imports.install()
    with lazy_imports.exempt_from_garbage_collection():
        from nemo.utils import logging as nemo_logging

    nemo_logging.remove_stream_handlers()
    nemo_logging.captureWarnings(False)
    with lazy_imports.exempt_from_garbage_collection():
        import nemo.collections.llm.gpt.model.qwen2  # noqa: F401
        from lightning.fabric.plugins.environments import MPIEnvironment

    MPIEnvironment.detect = staticmethod(lambda: False)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):  # "LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0]"
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
