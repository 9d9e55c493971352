"""Logits of one sequence on the CPU in fp32: through transformers, and through Megatron's GPTModel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from convert.hf import HFFolder
from convert.models import Model
from convert.nemo import PREFIX, NeMoCheckpoint, nemo_config
from training.safe_load import data_only, load_hf_model


def compute_logits(model: Model, ids: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """The model's logits, computed in fp32 from its weights rounded to `precision`.

    Args:
        model: an opened HF folder or NeMo checkpoint.
        ids: int64[seq].
        precision: dtype that the weights are rounded to first; torch.float32 leaves them as stored.

    Returns:
        float32[seq, vocab_size].
    """
    with torch.no_grad():
        if isinstance(model, HFFolder):
            return _hf_logits(model, ids, precision)
        return _megatron_logits(model, ids, precision)


def _hf_logits(model: HFFolder, ids: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    network = load_hf_model(model.path, torch.float32, attn_implementation="eager")
    _round_weights(network, precision)
    return network(ids[None]).logits[0]  # type: ignore[no-any-return]


def _megatron_logits(model: NeMoCheckpoint, ids: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    from training import cpu

    length = len(ids)
    with cpu.emulate_cuda(), _single_rank():
        gpt = _build_gpt(model, length)
        _load_weights(gpt, model)
        _round_weights(gpt, precision)
        future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)  # True: must not be attended to
        out = gpt(ids[None], torch.arange(length)[None], future)
    logits: torch.Tensor = out[0, :, : model.arch.vocab_size].float()
    return logits


def _build_gpt(model: NeMoCheckpoint, length: int) -> Any:
    """Megatron's GPTModel as NeMo builds it, of Megatron's local modules only: TE's do not run on a CPU."""
    config = nemo_config(model.arch, length, torch.float32)
    config.transformer_layer_spec = _local_block
    config.use_cpu_initialization, config.perform_initialization = True, False
    config.masked_softmax_fusion = config.gradient_accumulation_fusion = False
    return config.configure_model(None, pre_process=True, post_process=True).eval()


def _local_block(config: Any) -> Any:
    """Local layers with a local final norm; Megatron would choose TE's final norm wherever TE is installed."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=WrappedTorchNorm)


def _load_weights(gpt: Any, model: NeMoCheckpoint) -> None:
    """Load with Megatron's own loader, as training does; FP8 states are left out."""
    from megatron.core import dist_checkpointing

    wanted = {k: v for k, v in gpt.sharded_state_dict(prefix=PREFIX).items() if "_extra_state" not in k}
    with data_only(model.path):
        loaded = dist_checkpointing.load(wanted, str(model.weights))
    state = {name.removeprefix(PREFIX): value for name, value in loaded.items() if name in wanted}
    missing, unknown = gpt.load_state_dict(state, strict=False)
    assert not unknown and all("_extra_state" in name for name in missing), (missing, unknown)


def _round_weights(model: torch.nn.Module, precision: torch.dtype) -> None:
    if precision != torch.float32:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(precision))


@contextlib.contextmanager
def _single_rank() -> Iterator[None]:
    """A process group of one rank with Megatron's state for it; what is initialised already is left as it is."""
    from megatron.core import parallel_state, tensor_parallel
    from torch import distributed

    if parallel_state.model_parallel_is_initialized():
        yield
        return
    had_group = distributed.is_initialized()
    if not had_group:
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        with torch.random.fork_rng(devices=[]):
            tensor_parallel.model_parallel_cuda_manual_seed(0)  # attention needs its random stream even without dropout
            yield
    finally:
        tensor_parallel.get_cuda_rng_tracker().reset()
        parallel_state.destroy_model_parallel()
        if not had_group:
            distributed.destroy_process_group()
