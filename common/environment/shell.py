"""Which variables of the user's shell shape a run: they are recorded with it, and handed to its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from common.environment.known import explain
from common.environment.merge import USER, Setting
from common.environment.vccl import PRELOADS

# of the libraries that a run loads
_PREFIXES = (
    *("NCCL_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NVTE_", "GLOO_", "UCX_", "OMP_", "GOMP_", "KMP_"),
    *("MKL_", "OPENBLAS_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_", "WANDB_", "CPT_", "VCCL_"),
    *("MLFLOW_", "TELEMETRY_", "USE_LIBUV", "PYTHONHASHSEED", *PRELOADS),
)
# an image's record of what it holds, what every executor sets for itself, and what must not be written into a file
_NOT = re.compile(r".*_VERSION|TORCHELASTIC_.*|CUDA_(?:ARCH|PKG).*|(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD)S?(?:_.*)?")
_A_PATH = re.compile(r"(?!\w+://)[^=]*/")


def shaping_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that the libraries of a run read, in alphabetical order; no credentials."""
    return {key: environ[key] for key in sorted(environ) if key.startswith(_PREFIXES) and not _NOT.fullmatch(key)}


def shell_settings(
    environ: Mapping[str, str], settings: Iterable[Setting], *, same_files: bool, same_machine: bool = True
) -> list[Setting]:
    """What the user's shell sets beyond `settings`, as settings of their own.

    Args:
        environ: the shell's environment, before the environment set was applied.
        same_files: a path means the same file to the ranks; if not, variables that hold paths are left out.
        same_machine: the ranks run on this machine; if not, the numbers of its GPUs are left out.
    """
    known = {setting.key for setting in settings} | (set() if same_machine else {"CUDA_VISIBLE_DEVICES"})
    return [
        Setting(key, value, USER, explain(key).text)
        for key, value in shaping_variables(environ).items()
        if key not in known and (same_files or not _A_PATH.match(value))
    ]
