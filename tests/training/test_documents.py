"""Isolated documents: the model computes for each document what it computes for that document by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from data.datasets import DOCUMENT_STARTS
from data.module import CU_SEQLENS, ReadyBatch, data_step

pytestmark = pytest.mark.nemo

SEQ, VOCAB = 64, 512
LENGTHS = ([13, 30, 1, 20], [40, 24])  # of the documents in two samples


def _model(dtype: torch.dtype) -> Any:
    """A Qwen2.5 of two layers as the recipes build it on a CPU, on one rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from nemo.collections.llm.gpt.model.qwen2 import Qwen2Config

    from recipes.build.layers import local_layer_spec

    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = Qwen2Config(
        num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2, vocab_size=VOCAB,
        seq_length=SEQ, transformer_layer_spec=local_layer_spec, use_cpu_initialization=True, init_method_std=0.2,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, cross_entropy_loss_fusion=False,
        share_embeddings_and_output_weights=True, params_dtype=dtype, bf16=dtype == torch.bfloat16,
    )  # fmt: skip
    return config.configure_model(None).to(dtype).eval()


def _batch(lengths: tuple[list[int], ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """A micro batch as the loader gives it: the last token of each document is the end of document, 0."""
    torch.manual_seed(0)
    ids = torch.randint(1, VOCAB, (len(lengths), SEQ + 1))
    starts = torch.zeros(len(lengths), SEQ, dtype=torch.bool)
    for row, sizes in enumerate(lengths):
        assert sum(sizes) == SEQ
        first = 0
        for size in sizes:
            starts[row, first] = True
            ids[row, first + size - 1] = 0
            first += size
    tokens = ids[:, :-1]
    return {
        "tokens": tokens,
        "labels": ids[:, 1:],
        "loss_mask": (tokens != 0).float(),
        "position_ids": torch.arange(SEQ).expand(len(lengths), -1),
        DOCUMENT_STARTS: starts,
    }


def _forward(model: Any, batch: dict[str, torch.Tensor], logits: bool = False) -> torch.Tensor:
    """Losses fp32[mbs, seq], or logits [mbs, seq, vocab], of a batch whose documents may be isolated."""
    from training.documents import packing_arguments

    with torch.no_grad():
        ready: dict[str, Any] = data_step(iter([batch]))
        packing = packing_arguments(ready, SEQ)
        labels = None if logits else ready["labels"]
        out: torch.Tensor = model(ready["tokens"], ready["position_ids"], None, labels=labels, **packing)
    return out.view(len(batch["tokens"]), SEQ, *out.shape[2:]).float()


def _without_borders(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if name != DOCUMENT_STARTS}


def _measure(dtype: torch.dtype) -> dict[str, float]:
    """Differences between ways to compute the same losses and logits."""
    from training import cpu
    from training.fast import qkv

    with cpu.emulate_cuda():
        model, batch = _model(dtype), _batch()
        found: dict[str, float] = {}
        for name in ("stock", "fused_qkv"):
            if name == "fused_qkv":
                qkv.bind(model)
            losses, weighted = _forward(model, batch), 0.0
            for row, sizes in enumerate(LENGTHS):
                first = 0
                for size in sizes:
                    part = {key: value[row : row + 1, first : first + size] for key, value in batch.items()}
                    position = torch.arange(size)[None]
                    with torch.no_grad():
                        own = model(part["tokens"], position, None, labels=part["labels"]).float()
                    here = losses[row, first : first + size]
                    found[f"{name}: a token"] = max(found.get(f"{name}: a token", 0.0), float((own - here).abs().max()))
                    weighted += float((own * part["loss_mask"]).double().sum())
                    first += size
            mean = float((losses * batch["loss_mask"]).double().sum())
            found[f"{name}: the mean"] = abs(mean - weighted) / float(batch["loss_mask"].sum())

            other = {**batch, "tokens": batch["tokens"].clone()}
            other["tokens"][0, :12] += 1
            before, after = _forward(model, batch, logits=True), _forward(model, other, logits=True)
            found[f"{name}: changed document"] = float((before - after)[0, :13].abs().max())
            found[f"{name}: other documents"] = float((before - after)[0, 13:].abs().max())
            found[f"{name}: other samples"] = float((before - after)[1:].abs().max())
            before, after = (_forward(model, _without_borders(b), logits=True) for b in (batch, other))
            found[f"{name}: not isolated"] = float((before - after)[0, 13:].abs().max())

            whole = _batch(([SEQ], [SEQ]))
            today = _forward(model, _without_borders(whole))
            found[f"{name}: without borders"] = float((_forward(model, whole) - today).abs().max())
    return found


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_documents_are_computed_by_themselves(dtype: torch.dtype, bound: float, forked: Callable[..., Any]) -> None:
    """A token within 1e-5 nats, the mean within 1e-6; in bf16 0.05 and 0.005 (measured: 0.015 and 0.0002)."""
    found = forked(_measure, dtype)
    for name in ("stock", "fused_qkv"):
        assert found[f"{name}: a token"] < bound
        assert found[f"{name}: the mean"] < bound / 10
        assert found[f"{name}: without borders"] < bound
        assert found[f"{name}: changed document"] > 0.1 and found[f"{name}: not isolated"] > 0.1
        assert found[f"{name}: other documents"] == found[f"{name}: other samples"] == 0.0  # every bit


def test_borders_have_a_fixed_length() -> None:
    """Up to 32 documents, then powers of two; the end repeats the number of tokens."""
    from data.module import _find_borders

    borders = _find_borders(_batch()[DOCUMENT_STARTS])
    assert borders.dtype == torch.int32 and len(borders) == 33
    assert borders.tolist() == [0, 13, 43, 44, 64, 104] + [128] * 27
    many = torch.ones(2, SEQ, dtype=torch.bool)
    assert _find_borders(many).tolist() == list(range(129))
    assert len(_find_borders(many[:, :33])) == len(_find_borders(many[:1])) + 64 == 129


def test_a_graph_is_captured_again_for_more_documents_only() -> None:
    from training.fast.graph import GraphedSchedule

    schedule: Any = GraphedSchedule()
    for documents, captured_again, length in ((30, True, 33), (40, True, 65), (3, False, 65)):
        borders = torch.arange((33 if documents < 33 else 65), dtype=torch.int32).clamp(max=documents)
        schedule._copy_batch(ReadyBatch({"tokens": torch.zeros(1, 64), CU_SEQLENS: borders, "labels": None}))
        assert (schedule._captured is None) == captured_again
        assert len(schedule._batch[CU_SEQLENS]) == length
        assert schedule._batch[CU_SEQLENS][-1] == documents
        schedule._captured = object()
