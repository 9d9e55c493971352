"""Modules that NeMo imports and a pretraining run does not use: they are loaded when something of them is used.

`import nemo.collections.llm` imports every model, recipe and tool of NeMo, and through them pandas, scikit-learn,
modelopt and more: two thirds of the start of a run. `install` puts a finder before Python's own that makes each module
of `MODULES` an empty module object, which runs the module's file when an attribute is first asked for. This is
`importlib.util.LazyLoader` with three differences: `import` of such a module a second time does not load it, threads
wait for a load, and a package that only passes names on (`passes_names_on`) answers a name from the `from ... import`
line of its own file which binds it, without running the others.

What comes out is the module, class or function that the plain import gives. The exceptions are the functions under
`calls`: until their module is loaded they are functions that load it and pass the call on. A module that does
not exist, or was imported before, or is compiled, is left to Python. CPT_LAZY_IMPORTS=0 switches all of it off.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import _bootstrap
from types import ModuleType
from typing import Any

SWITCH = "CPT_LAZY_IMPORTS"


@dataclass(frozen=True)
class Lazy:
    """How one module is imported.

    Args:
        why: who imports it, and why a run does not need it.
        cpu_s: CPU seconds of its import in a plain `import nemo.collections.llm`, with what it is the first to import,
            estimated from one profile (docs/measurements/start-up.md). What two entries share is in both.
        passes_names_on: a package whose file only imports names. Its submodules are imported without it.
        found_in: name -> the module that defines it, for names that `from ... import *` brings into the package.
        calls: name -> `module:function`, for functions and classes that others import by name and seldom or never call
            in a run. The name is a function that imports the module when it is called.
        after: modules to import first, where the package's own imports are circular and its file has the order right.
        needs: a package without which its import fails, which its importer then handles.
    """

    why: str
    cpu_s: float = 0.0
    passes_names_on: bool = False
    found_in: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    needs: str | None = None


_QUANTIZATIONS = (  # what NeMo asks for when its quantization is imported
    *("INT8_DEFAULT_CFG", "INT8_SMOOTHQUANT_CFG", "FP8_DEFAULT_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
    *("INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "NVFP4_DEFAULT_CFG"),
)
_OPTIMIZATIONS = (  # what NeMo's llm.api imports by name
    *("DistillationGPTModel", "ExportConfig", "PruningConfig", "QuantizationConfig", "Quantizer"),
    *("prune_gpt_model", "save_pruned_model", "setup_trainer_and_restore_model_with_modelopt_spec"),
)
_IF_IN_CHECKPOINT = "set_modelopt_spec_if_exists_in_ckpt"
_PLOTS = (  # what the modules of torchmetrics import by name, of which most are types in annotations
    *("_AX_TYPE", "_CMAP_TYPE", "_PLOT_OUT_TYPE"),
    *("plot_confusion_matrix", "plot_curve", "plot_single_or_multi_val"),
)
MODULES = {
    # NeMo's packages that import all of their modules
    "nemo.collections.llm": Lazy("models, recipes, fine-tuning, T5 and BERT beside the one model trained", 13.2, True),
    "nemo.collections.llm.gpt.model": Lazy("twenty model families beside Qwen2", 1.5, True),
    "nemo.collections.llm.gpt.data": Lazy("fine-tuning data, which imports Hugging Face datasets", 0.02, True),
    "nemo.collections.llm.recipes": Lazy("a hundred recipes, some with NeMo 1's tokenizers", 0.1, True),
    "nemo.collections.nlp": Lazy("NeMo 1: some of its functions are used, none of its models", 1.2, True),
    "nemo.collections.nlp.data": Lazy("as nemo.collections.nlp", 0.2, True),
    "nemo.collections.nlp.models": Lazy("as nemo.collections.nlp; imports nltk and NeMo's speech", 1.0, True),
    "nemo.collections.nlp.modules": Lazy("as nemo.collections.nlp", 0.1, True),
    "nemo.collections.nlp.modules.common": Lazy("as nemo.collections.nlp", 0.1, True),
    "nemo.collections.nlp.modules.common.megatron": Lazy("as nemo.collections.nlp", 0.1, True),
    "nemo.collections.nlp.modules.common.tokenizer_utils": Lazy(
        "the data module, which is given a tokenizer, imports a function; transformers' models and scipy come with it",
        0.4,
        calls={"get_nmt_tokenizer": "nemo.collections.nlp.modules.common.tokenizer_utils:get_nmt_tokenizer"},
    ),
    # NVIDIA Model Optimizer: NeMo's strategy asks at each checkpoint whether the model was optimized by it
    "modelopt.torch": Lazy("quantization, pruning, distillation; imports peft and transformers' trainer", 4.2, True),
    "modelopt.torch.opt": Lazy(
        "as modelopt.torch", 2.4, True, {"ModeloptStateManager": "modelopt.torch.opt.conversion"}
    ),
    "modelopt.torch.opt.plugins": Lazy(
        "as modelopt.torch; for transformers, diffusers and peft",
        2.1,
        True,
        dict.fromkeys(
            ("save_sharded_modelopt_state", "restore_sharded_modelopt_state"),
            "modelopt.torch.opt.plugins.mcore_dist_checkpointing",
        ),
    ),
    "modelopt.torch.distill": Lazy(
        "as modelopt.torch",
        1.7,
        True,
        {
            "DistillationModel": "modelopt.torch.distill.distillation_model",
            "DistillationLossBalancer": "modelopt.torch.distill.loss_balancers",
        },
    ),
    "modelopt.torch.quantization": Lazy(
        "as modelopt.torch", 1.7, True, dict.fromkeys(_QUANTIZATIONS, "modelopt.torch.quantization.config")
    ),
    "nemo.collections.llm.modelopt": Lazy(
        "llm.api, for what quantizes, prunes and distills; imports pytorch_lightning and modelopt.torch.quantization",
        1.5,
        True,
        calls={name: f"nemo.collections.llm.modelopt:{name}" for name in _OPTIMIZATIONS}
        # a run that continues a checkpoint calls it; its own file imports neither of the two
        | {_IF_IN_CHECKPOINT: f"nemo.collections.llm.modelopt.model_utils:{_IF_IN_CHECKPOINT}"},
    ),
    "modelopt.torch.export": Lazy("as modelopt.torch", 0.1),
    "modelopt.torch.prune": Lazy("as modelopt.torch", 0.05),
    # torchmetrics: Lightning imports it for the class Metric
    "torchmetrics.functional": Lazy("hundreds of metrics", 4.1, True, after=("torchmetrics.utilities",)),
    "torchmetrics.functional.text": Lazy("its BERT score imports transformers' models", 3.0, True),
    "torchmetrics.text": Lazy("as torchmetrics.functional.text", 0.01, True),
    "torchmetrics.functional.image": Lazy("one of its functions imports torchvision", 0.2, True),
    "torchmetrics.utilities.plot": Lazy(
        "pictures of metrics; imports matplotlib",
        0.6,
        calls={name: f"torchmetrics.utilities.plot:{name}" for name in _PLOTS},
    ),
    "scipy.signal": Lazy("torchmetrics asks for `hamming`", 1.5, calls={"hamming": "scipy.signal.windows:hamming"}),
    # what transformers, NeMo and NeMo-Run import for one function
    "sklearn": Lazy("as sklearn.metrics; imports pandas and scipy.stats", 1.2),
    "sklearn.metrics": Lazy("transformers' assisted generation", 1.4, calls={"roc_curve": "sklearn.metrics:roc_curve"}),
    "datasets": Lazy("NeMo's quantization; imports aiohttp", 1.4, calls={"load_dataset": "datasets:load_dataset"}),
    "pandas": Lazy("NeMo's speech and NeMo 1 tools", 1.0),
    "networkx": Lazy(
        "NeMo-Run's graph of an experiment's jobs; torch names the class in an annotation",
        0.2,
        calls={"DiGraph": "networkx:DiGraph"},
    ),
    # what a GPU machine may have besides
    "transformer_engine.jax": Lazy("Transformer Engine, where JAX is installed", 0.7, needs="jax"),
    "zarr": Lazy("Megatron's old checkpoint format; imports CuPy", 0.3, calls={"Array": "zarr:Array"}),
}


class LazyModule(ModuleType):
    """A module whose file has not been run. It becomes an ordinary module when it is loaded."""

    def __getattr__(self, name: str) -> Any:
        found = _find_without_loading(self, name)
        if found is not None:
            return found
        _load(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        submodule = sys.modules.get(f"{self.__name__}.{name}")  # which `import` sets
        if not (name.startswith("__") or self.__name__ in _loading or (submodule is not None and submodule is value)):
            _load(self)  # first, so that the module's file does not undo the change
        ModuleType.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        _load(self)
        return dir(self)


_loading: dict[str, int] = {}  # module name -> the thread that runs its file


def _load(module: ModuleType) -> None:
    """Run the module's file, after its parent's, under the lock that `import` takes."""
    name = module.__name__
    if _loading.get(name) == threading.get_ident():  # the file itself asks: as in any module that is half imported
        return
    parent = sys.modules.get(name.rpartition(".")[0])
    if type(parent) is LazyModule:
        _load(parent)
    with _bootstrap._ModuleLockManager(name):  # type: ignore[attr-defined]  # the lock that `import` takes
        if type(module) is not LazyModule or name in _loading:
            return
        _loading[name] = threading.get_ident()
        try:
            assert module.__spec__ is not None and module.__spec__.loader is not None
            module.__spec__.loader.exec_module(module)
            if MODULES[name].passes_names_on:  # whose file would have run those below it, and all that they import
                for below in [one for one in MODULES if one.startswith(f"{name}.") and one in sys.modules]:
                    _load(sys.modules[below])
            module.__class__ = ModuleType  # type: ignore[assignment]
        finally:
            del _loading[name]


def _find_without_loading(module: ModuleType, name: str) -> Any:
    """The attribute, if it can be had without running the module's file; None if not.

    Raises:
        AttributeError: the module's file is running, and has not bound the name yet.
    """
    own = module.__name__
    if own in _loading and _loading[own] == threading.get_ident():
        raise AttributeError(f"module {own!r} has no attribute {name!r} (it is being imported)")
    if name == "__path__":  # `from module import name` looks for it; a package has it
        raise AttributeError(f"module {own!r} is not a package")
    entry = MODULES[own]
    if name in entry.calls:
        function = _call_later(*entry.calls[name].split(":"))
        ModuleType.__setattr__(module, name, function)  # the module's file binds the real one
        return function
    if not entry.passes_names_on or (name.startswith("__") and name.endswith("__")):
        return None
    names = _names_passed_on(own)
    source, attribute = names.get(name, (entry.found_in.get(name), name))
    try:
        if source is not None and source != own:
            return getattr(importlib.import_module(source), attribute)
        submodule = f"{own}.{attribute}"
        if source == own or ("*" not in names and importlib.util.find_spec(submodule) is not None):
            return importlib.import_module(submodule)
    except (ImportError, AttributeError):  # another version of the library: its file knows
        pass
    return None


def _call_later(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        loaded = importlib.import_module(module)
        if type(loaded) is LazyModule:
            _load(loaded)
        return getattr(loaded, name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = module
    return call


@functools.cache
def _names_passed_on(package: str) -> dict[str, tuple[str, str]]:
    """name -> (module, name there), from the `from ... import` lines of the package's file, also those under `try`.

    `import *` is followed into packages of `MODULES`; of any other module the entry "*" says that more names come.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return {}
    with open(spec.origin, "rb") as file:  # noqa: PTH123 - pathlib may not be imported yet in a child process
        tree = ast.parse(file.read())
    lines = [line for node in tree.body for line in (node.body if isinstance(node, ast.Try) else [node])]
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        if not isinstance(line, ast.ImportFrom):
            continue
        source = importlib.util.resolve_name("." * line.level + (line.module or ""), package)
        for alias in line.names:
            if alias.name != "*":
                found[alias.asname or alias.name] = (source, alias.name)
            elif source in MODULES:
                found |= {name: (source, name) for name in _names_passed_on(source) if not name.startswith("_")}
            else:
                found["*"] = (source, "*")
    return found


class _Loader(importlib.abc.Loader):
    """Makes the module lazy; the loader that runs its file is `real`."""

    def __init__(self, real: importlib.machinery.SourceFileLoader) -> None:
        self.real = real

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.real
        module.__class__ = LazyModule
        for name in MODULES[module.__name__].after:
            importlib.import_module(name)


class _Imported(importlib.abc.Loader):
    """Gives a submodule that was imported while its parent was loaded to the `import` that asked for it."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in MODULES and (not (needs := MODULES[fullname].needs) or importlib.util.find_spec(needs)):
            return self._lazy(fullname, path, target)
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if type(parent) is LazyModule and not MODULES[parent.__name__].passes_names_on:
            _load(parent)  # as always: a package's file runs before its submodules
            if fullname in sys.modules:
                return importlib.machinery.ModuleSpec(fullname, _Imported(sys.modules[fullname]))
        return None

    def _lazy(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if type(spec.loader) is importlib.machinery.SourceFileLoader and target is None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


def install() -> None:
    """Import the modules of `MODULES` lazily from now on, unless CPT_LAZY_IMPORTS=0."""
    if os.environ.get(SWITCH) != "0" and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@contextlib.contextmanager
def exempt_from_garbage_collection() -> Iterator[None]:
    """Do not look for garbage among the objects that an import makes, neither now nor later: almost all of them stay.

    NeMo's are 850,000. Searching them takes a tenth of the import's time, and later 0.2 to 0.6 s each time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
