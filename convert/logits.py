"""Logits of one sequence on the CPU in fp32: through transformers, and through Megatron's GPTModel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from convert.hf import HFFolder
from convert.nemo import PREFIX, NeMoCheckpoint, nemo_config


def logits(model: HFFolder | NeMoCheckpoint, ids: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """The model's logits, computed in fp32 from its weights rounded to `precision`.

    Args:
        model: an opened HF folder or NeMo checkpoint.
        ids: int64[seq].
        precision: torch.float32 leaves the weights as stored.

    Returns:
        float32[seq, vocab_size].
    """
    with torch.no_grad():
        if isinstance(model, HFFolder):
            return _hf(model, ids, precision)
        return _megatron(model, ids, precision)


def _hf(model: HFFolder, ids: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model.path, torch_dtype=torch.float32, attn_implementation="eager")
    _round(hf.eval(), precision)
    return hf(ids[None]).logits[0]  # type: ignore[no-any-return]


def _megatron(model: NeMoCheckpoint, ids: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    from training import cpu

    length = len(ids)
    with cpu.backend(), _one_rank():
        gpt = _build(model, length)
        _load(gpt, model)
        _round(gpt, precision)
        future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)  # True: may not be attended to
        out = gpt(ids[None], torch.arange(length)[None], future)
    return out[0, :, : model.arch.vocab_size].float()


def _build(model: NeMoCheckpoint, length: int) -> torch.nn.Module:
    """Megatron's GPTModel as NeMo builds it, all of it Megatron's local modules: TE's do not run on a CPU."""
    config = nemo_config(model.arch, length, torch.float32)
    config.transformer_layer_spec = _local_block
    config.use_cpu_initialization, config.perform_initialization = True, False
    config.masked_softmax_fusion = config.gradient_accumulation_fusion = False
    return config.configure_model(None, pre_process=True, post_process=True).eval()  # type: ignore[no-any-return]


def _local_block(config: Any) -> Any:
    """Local layers and, unlike Megatron's choice for local layers where TE is installed, a local final norm."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=WrappedTorchNorm)


def _load(gpt: torch.nn.Module, model: NeMoCheckpoint) -> None:
    """Through Megatron's own loader, as training restores; FP8 states are left out."""
    from megatron.core import dist_checkpointing

    wanted = {k: v for k, v in gpt.sharded_state_dict(prefix=PREFIX).items() if "_extra_state" not in k}
    loaded = dist_checkpointing.load(wanted, str(model.weights))
    state = {name.removeprefix(PREFIX): value for name, value in loaded.items() if name in wanted}
    missing, unknown = gpt.load_state_dict(state, strict=False)
    assert not unknown and all("_extra_state" in name for name in missing), (missing, unknown)


def _round(model: torch.nn.Module, precision: torch.dtype) -> None:
    if precision != torch.float32:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(precision))


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of this process alone and Megatron's state for it; what is set up already stays as it is."""
    from megatron.core import parallel_state, tensor_parallel
    from torch import distributed

    if parallel_state.model_parallel_is_initialized():
        yield
        return
    group = distributed.is_initialized()
    if not group:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        with torch.random.fork_rng(devices=[]):
            tensor_parallel.model_parallel_cuda_manual_seed(0)  # attention asks for its stream even without dropout
            yield
    finally:
        tensor_parallel.get_cuda_rng_tracker().reset()
        parallel_state.destroy_model_parallel()
        if not group:
            distributed.destroy_process_group()
