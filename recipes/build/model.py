"""The model slot: Qwen2.5 as a NeMo model, tied where Qwen ties it."""

from __future__ import annotations

import nemo_run as run
from nemo.collections import llm
from nemo.collections.llm.gpt.model.qwen2 import Qwen2Config

from data.module import data_step
from recipes.build.layers import auto_layer_spec, local_layer_spec
from recipes.plan import Plan
from training.documents import forward_step


def qwen25(plan: Plan) -> run.Config[llm.Qwen2Model]:
    """Qwen2.5 of the plan's shape. NeMo's Qwen2Config hard-codes untied embeddings: set from the shape here."""
    shape = plan.shape
    config = run.Config(
        Qwen2Config,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        vocab_size=shape.vocab_size,
        share_embeddings_and_output_weights=shape.tied,
        seq_length=plan.model_seq_length,
        transformer_layer_spec=auto_layer_spec,
        data_step_fn=data_step,
    )
    if plan.isolate_documents:
        config.forward_step_fn = forward_step
    return run.Config(llm.Qwen2Model, config=config)


def recompute(model: run.Config[llm.Qwen2Model]) -> None:
    """Selective recompute: core attention is computed again in the backward pass instead of being kept."""
    model.config.recompute_granularity = "selective"


def interleaved(model: run.Config[llm.Qwen2Model]) -> None:
    """With virtual stages: one message at a time, overlapped with the computation (training/gates.py says why)."""
    model.config.overlap_p2p_comm = True
    model.config.batch_p2p_comm = False


def on_cpu(model: run.Config[llm.Qwen2Model]) -> None:
    """Local layers with SDPA attention, initialised on the CPU; fused CUDA kernels off."""
    model.config.transformer_layer_spec = local_layer_spec
    model.config.use_cpu_initialization = True
    model.config.masked_softmax_fusion = False
    model.config.gradient_accumulation_fusion = False
    model.config.cross_entropy_loss_fusion = False
    model.config.deallocate_pipeline_outputs = False  # Gloo may still be reading what was sent
