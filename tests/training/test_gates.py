"""Truth gates, each on the stock stack (where it must stop the run) and on ours (where it must not)."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from common.errors import GateError
from data.datasets import WholeMaskGPTDataset
from tests.training.conftest import SHORT, train
from training import gates

pytestmark = pytest.mark.nemo

EOD, SEQ = 0, 128


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of about 30 tokens, each ended by EOD: the case the stock loss mask is worst at."""
    prefix = tmp_path_factory.mktemp("short") / "train"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    random = np.random.default_rng(0)
    for _ in range(5000):
        ids = np.append(random.integers(1, 4096, random.integers(20, 40)), EOD)
        builder.add_document(torch.from_numpy(ids.astype(np.int64)), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return prefix


class _Tokenizer:
    """Qwen's trap in small: the padding id is the end-of-document id."""

    eod = pad = EOD
    unique_identifiers = {"class": "trap"}


def _dataset(kind: type[GPTDataset], prefix: Path, samples: int, **config: Any) -> GPTDataset:
    settings = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQ,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=config.get("eod_mask_loss", False),
        create_attention_mask=False,
        path_to_cache=str(prefix.parent / "cache"),
    )
    indexed = IndexedDataset(str(prefix), multimodal=False, mmap=True)
    documents = np.arange(len(indexed), dtype=np.int32)
    return kind(indexed, str(prefix), documents, samples, Split.train, settings)


def test_a_thousand_samples_keep_every_token(short_documents: Path) -> None:
    """Through a real loader: all tokens in the loss, separators keep their id."""
    dataset = _dataset(WholeMaskGPTDataset, short_documents, 1000)
    separators = 0
    for index, batch in enumerate(torch.utils.data.DataLoader(dataset, batch_size=1, num_workers=1)):
        assert int(batch["loss_mask"].sum()) == SEQ, f"sample {index}"
        stored = torch.from_numpy(dataset._query_document_sample_shuffle_indices(index)[0])
        assert torch.equal(batch["labels"][0], stored[1:])
        separators += int((batch["labels"] == EOD).sum())
        if index == 999:
            break
    assert separators > 1000 * SEQ / 45


def test_the_stock_dataset_loses_the_signal(short_documents: Path) -> None:
    """The bug the fix is for: if this passes no longer, WholeMaskGPTDataset can go."""
    dataset = _dataset(GPTDataset, short_documents, 1000)
    kept = [int(dataset[index]["loss_mask"].sum()) for index in range(200)]
    assert kept[0] < SEQ
    assert kept[-1] < SEQ / 10


@pytest.mark.parametrize("eod_mask_loss", (False, True))
def test_mask_gate(short_documents: Path, eod_mask_loss: bool) -> None:
    ours = _dataset(WholeMaskGPTDataset, short_documents, 1000, eod_mask_loss=eod_mask_loss)
    share = gates.check_loss_mask(list(gates.probe_samples(ours)), EOD, eod_mask_loss)
    assert share == 1.0 if not eod_mask_loss else 0.95 < share < 0.98
    stock = _dataset(GPTDataset, short_documents, 1000, eod_mask_loss=eod_mask_loss)
    with pytest.raises(GateError, match="loss mask"):
        gates.check_loss_mask(list(gates.probe_samples(stock)), EOD, eod_mask_loss)


def test_rewritten_ids_are_caught(tmp_path: Path) -> None:
    """With pad = 7 the stock dataset turns every 7 into 0."""
    prefix = tmp_path / "train"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(100):
        builder.add_document(torch.arange(1, 40), [39])
    builder.finalize(f"{prefix}.idx")
    trap = _dataset(GPTDataset, prefix, 10)
    trap._pad_token_id = 7
    with pytest.raises(GateError, match="rewrites token ids"):
        gates.check_ids(list(gates.probe_samples(trap)), 4096)
    gates.check_ids(list(gates.probe_samples(_dataset(WholeMaskGPTDataset, prefix, 10))), 4096)
    with pytest.raises(GateError, match="outside the model's vocabulary"):
        gates.check_ids(list(gates.probe_samples(_dataset(WholeMaskGPTDataset, prefix, 10))), 39)


def test_a_violated_gate_stops_the_run_before_step_1(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(GateError):
        forked(lambda: train(sample, *SHORT, "trainer.max_steps=5", dataset=GPTDataset))
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


def test_tokenizer_gates(sample: Path, tmp_path: Path) -> None:
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

    from data.manifest import load_manifest

    own = AutoTokenizer(str(sample / "prose" / "tokenizer"), use_fast=True)
    domains = {"prose": load_manifest(sample / "prose")}
    gates.check_tokenizers(own, own, domains)
    gates.check_special_ids(own, 4096)
    with pytest.raises(GateError, match="larger than the model's vocabulary"):
        gates.check_special_ids(own, 4000)
    own.tokenizer.add_tokens(["<other>"])
    with pytest.raises(GateError, match="another tokenizer"):
        gates.check_tokenizers(own, own, domains)
    other = AutoTokenizer(str(sample / "prose" / "tokenizer"), use_fast=True)
    with pytest.raises(GateError, match="different tokenizers"):
        gates.check_tokenizers(other, own, domains)


def test_no_silent_gpt2_tokenizer(sample: Path) -> None:
    from common.errors import UserError
    from data.module import PreparedDataModule

    prefix = [str(sample / "prose" / "train")]
    with pytest.raises(UserError, match="no tokenizer"):
        PreparedDataModule(paths={"train": prefix, "validation": prefix, "test": prefix})


def test_tied_gate_and_the_real_parameter_count() -> None:
    """Stock NeMo builds Qwen2.5-0.5B untied; ours is the released 494,032,768 parameters."""
    from nemo.collections.llm import Qwen25Config500M

    from recipes import registry

    with pytest.raises(GateError, match="untied"):
        gates.check_tied(Qwen25Config500M())
    config = registry.resolve("qwen25_500m")().model.config
    gates.check_tied(config)
    reduced = registry.resolve("qwen25_500m_single")().model.config
    gates.check_tied(types.SimpleNamespace(**reduced.__arguments__))


def _count_parameters(name: str) -> tuple[int, set[str]]:
    import fiddle as fdl
    from megatron.core import parallel_state

    from recipes import registry
    from recipes.build import layers
    from training import cpu

    with cpu.emulate_cuda():
        torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        config = registry.resolve(name)().model.config
        config.transformer_layer_spec = layers.local_layer_spec
        config.use_cpu_initialization = True
        config.perform_initialization = False
        config.gradient_accumulation_fusion = False
        model = fdl.build(config).configure_model(None, pre_process=True, post_process=True)
    names = {n for n, _ in model.named_parameters()}
    return sum(p.numel() for p in model.parameters()), names


@pytest.mark.parametrize(("name", "count"), (("qwen25_500m", 494_032_768), ("qwen25_500m_single", 306_543_360)))
def test_megatron_builds_what_the_plan_says(name: str, count: int, forked: Callable[..., Any]) -> None:
    found, names = forked(_count_parameters, name)
    assert found == count
    assert ("output_layer.weight" in names) == (name == "qwen25_500m_single")
