"""Random Qwen2 models through import, training and export; each fault of NeMo's own connectors; every user error."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import convert.tensor_map
from common.errors import UserError
from convert.export_hf import export_hf, find_source
from convert.import_hf import import_hf, import_once
from convert.models import open_model
from convert.nemo import PREFIX, NeMoCheckpoint
from convert.tensor_map import Architecture, Kind
from convert.verify import Verification, summarize, verify

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).resolve().parents[2]
TIED: dict[str, Any] = {"tied": True, "heads": 4, "groups": 2, "hidden": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "tied, 2 groups": TIED,
    "tied, 6 heads in 3 groups": {"tied": True, "heads": 6, "groups": 3, "hidden": 96},
    "untied, 7 heads a group as 7B": {"tied": False, "heads": 14, "groups": 2, "hidden": 112},
}


def make_hf(
    folder: Path, *, tied: bool, heads: int, groups: int, hidden: int, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """A random HF Qwen2 whose norms are not one and biases not zero, so that a weight left uninitialised shows."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    settings = {
        "hidden_size": hidden,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": 4096,
        "tie_word_embeddings": tied,
        "rope_theta": 1e6,
        "max_position_embeddings": 2048,
        "sliding_window": 777,
        "bos_token_id": 3,
        "eos_token_id": 0,
        "torch_dtype": dtype,
    }
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**(settings | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale, centre = (0.3, 1.0) if "norm" in name else (0.5 if "bias" in name else 0.08, 0.0)
            parameter.copy_(centre + scale * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "corpora/sample/prose/tokenizer").save_pretrained(folder)
    return folder


def _stop_checkpoint_writers() -> None:
    """NeMo's checkpoint writers are processes that would outlive this one."""
    for child in multiprocessing.active_children():
        child.terminate()


def _train(sample: Path, base: Path, arch: Architecture) -> tuple[float, dict[str, torch.Tensor]]:
    """20 steps of the tiny recipe from `base`; the first logged loss, and the batch it was computed on."""
    import nemo_run as run
    from nemo.lightning.pytorch.strategies.utils import RestoreConfig

    import data.module as data_module
    from common.spec import RunSpec
    from launcher.launch import launch
    from recipes import registry

    batches: list[dict[str, torch.Tensor]] = []
    module: Any = data_module
    original = module.gpt_data_step
    recipe = registry.resolve("qwen25_tiny")
    build = recipe.build

    def from_base(plan: Any) -> Any:
        partial = build(plan)
        partial.resume.restore_config = run.Config(RestoreConfig, path=str(base), load_artifacts=False)
        return partial

    def recording(iterator: Any) -> Any:
        batch = original(iterator)
        if torch.is_grad_enabled():  # not validation's
            batches.append(batch)
        return batch

    recipe.build, module.gpt_data_step = from_base, recording
    words = {
        "data.paths": sample / "prose",
        "data.index_mapping_dir": Path.cwd() / "cache",
        "data.seq_length": 64,
        "model.config.seq_length": 64,
        "model.config.num_layers": arch.num_layers,
        "model.config.hidden_size": arch.hidden_size,
        "model.config.ffn_hidden_size": arch.ffn_hidden_size,
        "model.config.num_attention_heads": arch.num_attention_heads,
        "model.config.num_query_groups": arch.num_query_groups,
        "model.config.share_embeddings_and_output_weights": arch.tied,
        "trainer.max_steps": 20,
        "trainer.val_check_interval": 1000,
        "trainer.log_every_n_steps": 1,
    }
    overrides = tuple(f"{path}={value}" for path, value in words.items())
    assert launch(RunSpec(recipe="qwen25_tiny", name="run", overrides=overrides)) == 0
    _stop_checkpoint_writers()
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    return next(row["loss"] for row in rows if "loss" in row), batches[0]


def _hf_loss(folder: Path, batch: dict[str, torch.Tensor]) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        logits = model(batch["tokens"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()


def _round_trip(sample: Path, shape: dict[str, Any]) -> dict[str, Any]:
    hf = make_hf(Path("hf"), **shape)
    base = import_hf("hf", Path("base"))
    imported = verify(hf, base, show=False)
    loss, batch = _train(sample, base, open_model(base).arch)
    trained = Path("runs/run/checkpoints/step-20")
    out = export_hf(trained, Path("out"))
    return {
        "imported": imported,
        "loss": (loss, _hf_loss(hf, batch)),
        "moved": verify(hf, trained, show=False),
        "exported": verify(out, trained, show=False),
        "same files": {f.name: f.read_bytes() == (out / f.name).read_bytes() for f in hf.glob("*.[jt]*")},
        "loss after": _hf_loss(out, batch),
    }


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_there_and_back_with_20_steps_between(sample: Path, forked: Callable[..., Any], shape: dict[str, Any]) -> None:
    """Import, verify, train from the weights, export, verify: and the first loss is HF's."""
    result = forked(_round_trip, sample, shape)
    for name in ("imported", "moved", "exported"):
        print(name, *summarize(result[name]), sep="\n  ")
    print("step-0 loss, HF's, HF's after 20 steps:", *result["loss"], result["loss after"])
    assert result["imported"].ok and result["exported"].ok
    assert result["imported"].agreeing == len(result["imported"].positions) == 128
    assert not result["moved"].ok and result["moved"].logit_difference > 0.01
    assert result["loss"][0] == pytest.approx(result["loss"][1], abs=1e-5)
    assert result["loss after"] < result["loss"][1] - 0.1
    assert len(result["same files"]) >= 6 and all(result["same files"].values()), result["same files"]


def _keys(folder: Path) -> dict[str, tuple[int, ...]]:
    checkpoint = NeMoCheckpoint(folder)
    return {name: tuple(getattr(meta, "size", ())) for name, meta in checkpoint._stored.items() if PREFIX in name[:7]}


def test_what_is_written_is_what_megatron_writes(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    """Same names and shapes as a trained checkpoint's; beside them the empty states that only TE asks for."""

    def both() -> None:
        make_hf(Path("hf"), **TIED)
        _train(sample, import_hf("hf", Path("base")), open_model("base").arch)

    forked(both)
    ours, megatrons = _keys(tmp_path / "base"), _keys(tmp_path / "runs/run/checkpoints/step-20")
    assert {name: ours.get(name) for name in megatrons} == megatrons
    only_te = ("core_attention._extra_state", "final_layernorm._extra_state")
    assert all(any(word in name for word in only_te) for name in ours.keys() - megatrons.keys())


def test_bf16_stays_bf16_and_fp32_weights_can_leave_as_bf16(forked: Callable[..., Any], tmp_path: Path) -> None:
    def run() -> list[Verification]:
        half, full = make_hf(Path("half"), **TIED, dtype=torch.bfloat16), make_hf(Path("full"), **TIED)
        assert NeMoCheckpoint(import_hf("half", Path("half.nemo"))).dtype == torch.bfloat16
        import_hf("full", Path("full.nemo"))
        export_hf(Path("half.nemo"), Path("half.out"))
        export_hf(Path("full.nemo"), Path("full.out"), dtype="bfloat16")
        pairs = ((half, "half.nemo"), (half, "half.out"), (full, "full.out"), ("full.nemo", half))
        return [verify(*pair, show=False) for pair in pairs]

    results = forked(run)
    assert [r.ok for r in results] == [True] * 4
    assert all(r.precision == torch.bfloat16 for r in results)
    assert (tmp_path / "half.out/config.json").read_bytes() == (tmp_path / "half/config.json").read_bytes()
    assert (tmp_path / "half.out/model.safetensors").stat().st_size == (
        tmp_path / "half/model.safetensors"
    ).stat().st_size
    assert json.loads((tmp_path / "full.out/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_export_of_a_model_trained_from_scratch(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    from tests.training.conftest import train

    def run() -> tuple[Verification, Any, str, int]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        train(sample, "trainer.max_steps=3", "trainer.val_check_interval=1000")
        _stop_checkpoint_writers()
        out = export_hf(Path("runs/run/checkpoints/step-3"), Path("out"))
        model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        ids = model.generate(**tokenizer("the", return_tensors="pt"), max_new_tokens=4, do_sample=False)
        return verify(out, "run"), model.config, tokenizer.decode(ids[0]), end  # a run's name: its newest checkpoint

    result, config, text, end = forked(run)
    assert result.ok and text.startswith("the")
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (tmp_path / "out/config.json").stat().st_mode
    assert (config.tie_word_embeddings, config.max_position_embeddings, config.rope_theta) == (True, 256, 1e6)
    assert config.eos_token_id == config.bos_token_id == end
    assert config.torch_dtype == torch.float32


# --- what stock NeMo does with the same model: where one of these no longer fails, our own code can go


def _stock_import(hf: Path) -> Path:
    from nemo.collections.llm.gpt.model.qwen2 import HFQwen2Importer

    from training import cpu

    with cpu.emulate_cuda():
        stock = Path(HFQwen2Importer(str(hf)).apply(Path("stock")))
    _stop_checkpoint_writers()
    return stock


def test_stock_importer_unties_a_tied_model(forked: Callable[..., Any]) -> None:
    def run() -> tuple[int, int, int]:
        from safetensors.torch import load_file

        hf = make_hf(Path("hf"), **TIED)
        true = sum(t.numel() for t in load_file("hf/model.safetensors").values())
        ours = open_model(import_hf("hf", Path("base"))).arch.num_parameters
        return true, ours, open_model(_stock_import(hf)).arch.num_parameters

    true, ours, stock = forked(run)
    assert ours == true
    assert stock == true + 4096 * 64


def test_stock_importer_leaves_the_norms_at_one_without_te(forked: Callable[..., Any]) -> None:
    def run() -> tuple[Verification, Verification]:
        hf = make_hf(Path("hf"), **(TIED | {"tied": False}))
        ours = verify(hf, import_hf("hf", Path("base")), show=False)
        return ours, verify(hf, _stock_import(hf), show=False)

    ours, stock = forked(run)
    assert ours.ok
    wrong = {p.name.split(".")[-2] for p in stock.parameters if p.difference}
    assert not stock.ok and wrong == {"input_layernorm", "post_attention_layernorm"}


def test_stock_exporter_rewrites_the_config(forked: Callable[..., Any], tmp_path: Path) -> None:
    """On a checkpoint with seq_length 64, as training on short sequences leaves it."""

    def run() -> Any:
        from nemo.collections.llm.gpt.model.qwen2 import HFQwen2Exporter

        make_hf(Path("hf"), **TIED)
        base = import_hf("hf", Path("base"))
        io = base / "context/io.json"
        io.write_text(io.read_text().replace("2048", "64"))
        export_hf(base, Path("out"))
        return HFQwen2Exporter(str(base)).config

    stock = forked(run)
    ours = json.loads((tmp_path / "out/config.json").read_text())
    assert (ours["bos_token_id"], ours["eos_token_id"]) == (3, 0) != (stock.bos_token_id, stock.eos_token_id)
    assert (ours["max_position_embeddings"], stock.max_position_embeddings) == (2048, 64)
    assert (ours["sliding_window"], stock.sliding_window) == (777, 64)
    assert (ours["tie_word_embeddings"], stock.tie_word_embeddings) == (True, False)


# --- verify is able to fail


def _wrong_in_both_directions(fault: str) -> None:
    """Break the mapping so that import and export still undo each other: only the logits can tell."""
    join, split = convert.tensor_map._join, convert.tensor_map._split

    def swapped(kind: Kind, arch: Any, parts: list[torch.Tensor]) -> torch.Tensor:
        return join(kind, arch, parts[::-1] if kind == "gate_up" else parts)

    def unswapped(kind: Kind, arch: Any, joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return split(kind, arch, joined)[:: -1 if kind == "gate_up" else 1]

    if fault == "gate and up swapped":
        convert.tensor_map._join, convert.tensor_map._split = swapped, unswapped
    else:

        def split_without_groups(arch: Any, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
            kv = arch.num_query_groups * arch.head_dim
            return torch.split(qkv, [arch.num_attention_heads * arch.head_dim, kv, kv])

        convert.tensor_map.interleave_qkv = lambda arch, *parts: torch.cat(parts)
        convert.tensor_map.split_qkv = split_without_groups


@pytest.mark.parametrize("fault", ("gate and up swapped", "QKV not interleaved by group"))
def test_a_wrong_mapping_cannot_pass(forked: Callable[..., Any], fault: str) -> None:
    def run() -> Verification:
        hf = make_hf(Path("hf"), **TIED)
        _wrong_in_both_directions(fault)
        return verify(hf, import_hf("hf", Path("base")), show=False)

    result = forked(run)
    assert result.parameter_difference == 0
    assert not result.ok and result.logit_difference > 0.01


def test_one_changed_value_cannot_pass(forked: Callable[..., Any], tmp_path: Path) -> None:
    def run() -> tuple[Verification, Verification]:
        from safetensors.torch import load_file, save_file

        hf = make_hf(Path("hf"), **TIED)
        shutil.copytree(hf, "other")
        weights = load_file("other/model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
        save_file(weights, "other/model.safetensors", {"format": "pt"})
        base = import_hf("hf", Path("base"))
        make_hf(Path("eps"), **TIED, rms_norm_eps=1e-5)
        return verify("other", base), verify("eps", base)

    changed, eps = forked(run)
    assert [p.name for p in changed.parameters if p.difference] == ["model.layers.1.mlp.up_proj.weight"]
    assert not changed.ok and not eps.ok
    assert eps.architecture == ["norm_eps: 1e-05, 1e-06"]


# --- the cache


def test_imported_once_and_made_again_only_when_it_must(forked: Callable[..., Any], tmp_path: Path) -> None:
    def run() -> list[tuple[Path, int]]:
        hf, cache = make_hf(Path("hf"), **TIED), Path("cache")
        seen = []

        def use() -> None:
            folder = import_once("hf", cache)
            seen.append((folder, (folder / "import.json").stat().st_mtime_ns))

        use()
        use()
        (seen[0][0] / "weights/__0_0.distcp").write_bytes(b"cut")
        use()
        make_hf(hf, **TIED, rms_norm_eps=1e-5)
        use()
        assert import_once(str(seen[-1][0]), cache) == seen[-1][0]
        return seen

    first, again, repaired, other = forked(run)
    assert first == again
    assert repaired[0] == first[0] and repaired[1] != first[1]
    assert other[0] != first[0]
    assert sorted((tmp_path / "cache").iterdir()) == sorted(tmp_path / p for p in (first[0], other[0]))


# --- permissions and names


def test_files_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    """safetensors creates its files as 0600: other users could not read an exported model."""
    from convert.output_folder import complete_or_absent

    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    with complete_or_absent(tmp_path / "out") as folder:
        (folder / "deep").mkdir()
        (folder / "deep/weights").touch(mode=0o600)
    assert (tmp_path / "out/deep/weights").stat().st_mode == ordinary.stat().st_mode
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["deep"]


# --- what a user can get wrong


def _edit_config(**changes: Any) -> None:
    file = Path("hf/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file("hf/model.safetensors")
    change(weights)
    save_file(weights, "hf/model.safetensors", {"format": "pt"})


NORM = "model.norm.weight"
BAD_SOURCES: dict[str, tuple[Callable[[], object], str]] = {
    "llama": (lambda: _edit_config(model_type="llama"), "model_type qwen2"),
    "quantised": (lambda: _edit_config(quantization_config={"bits": 4}), "unquantised"),
    "scaled rope": (lambda: _edit_config(rope_scaling={"type": "yarn", "factor": 4.0}), "rope_scaling null"),
    "sliding window": (lambda: _edit_config(use_sliding_window=True), "use_sliding_window false"),
    "no config": (lambda: Path("hf/config.json").unlink(), "no such file"),
    "broken config": (lambda: Path("hf/config.json").write_text("{"), "JSONDecodeError"),
    "no weights": (lambda: Path("hf/model.safetensors").unlink(), "has no weights"),
    "pickled": (lambda: Path("hf/model.safetensors").rename("hf/pytorch_model.bin"), "only pytorch_model.bin"),
    "cut weights": (lambda: Path("hf/model.safetensors").write_bytes(b"x" * 99), "complete safetensors file"),
    "missing tensor": (lambda: _edit_weights(lambda w: w.pop(NORM)), f"missing {NORM}"),
    "unknown tensor": (lambda: _edit_weights(lambda w: w.update(a=w[NORM].clone())), "unknown a"),
    "wrong shape": (lambda: _edit_weights(lambda w: w.update({NORM: torch.ones(5)})), r"is \[5\], not \[64\]"),
    "integers": (lambda: _edit_weights(lambda w: w.update({NORM: w[NORM].int()})), "fp32 or bf16"),
    "false tie": (lambda: _edit_weights(lambda w: w.update({"lm_head.weight": torch.zeros(4096, 64)})), "lm_head"),
    "no tokenizer": (lambda: Path("hf/tokenizer.json").unlink(), "has no tokenizer"),
    "output in use": (lambda: Path("base/x").mkdir(parents=True), "is in use"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources(forked: Callable[..., Any], tmp_path: Path, case: str) -> None:
    """Each error names its cause, and nothing is left behind."""
    spoil, words = BAD_SOURCES[case]

    def run() -> None:
        make_hf(Path("hf"), **TIED)
        spoil()
        import_hf("hf", Path("base"))

    with pytest.raises(UserError, match=words):
        forked(run)
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("hf", "base")] == []
    assert case == "output in use" or not (tmp_path / "base").exists()


def test_bad_outputs_and_checkpoints(
    forked: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no such folder"):
        import_hf("./nowhere", tmp_path / "base")
    with pytest.raises(UserError, match="huggingface-cli download nobody/nothing"):
        import_hf("nobody/nothing", tmp_path / "base")  # tests run with HF_HUB_OFFLINE=1
    with pytest.raises(UserError, match="no such folder"):
        export_hf(tmp_path / "nowhere", tmp_path / "out")

    def run() -> None:
        make_hf(Path("hf"), **TIED)
        make_hf(Path("eps"), **TIED, rms_norm_eps=1e-5)
        import_hf("hf", Path("base"))

    forked(run)
    base = tmp_path / "base"
    with pytest.raises(UserError, match="norm_eps"):
        export_hf(base, tmp_path / "out", like=tmp_path / "eps")
    with pytest.raises(UserError, match="float32 or bfloat16"):
        export_hf(base, tmp_path / "out", dtype="int8")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(UserError, match="not enough disk space"):
        export_hf(base, tmp_path / "out")
    with pytest.raises(UserError, match="not enough disk space"):
        import_hf(str(tmp_path / "hf"), tmp_path / "out")
    monkeypatch.undo()
    (tmp_path / "base-unfinished").touch()
    with pytest.raises(UserError, match="interrupted"):
        export_hf(base, tmp_path / "out")
    (tmp_path / "base-unfinished").unlink()
    (base / "weights/.metadata").write_bytes(b"x")
    with pytest.raises(UserError, match="metadata"):
        export_hf(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_base_is_an_error(tmp_path: Path) -> None:
    """Such a run is never exported as if it was trained from scratch."""
    run = tmp_path / "runs/run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("resume:\n  restore_config:\n    path: models/gone\n")
    with pytest.raises(UserError, match="models/gone"):
        find_source(run / "checkpoints/step-5")
