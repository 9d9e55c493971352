"""The peer: transformers' Qwen2 of the same shape in a tuned plain training loop, as its users write it.

    python -m bench.peer_hf --recipe qwen25_500m_single [--variant NAME] [path=value ...]

Shape, sequence, batch and corpus are the recipe's (`path=value` as in bench.throughput). fp32 master weights under bf16
autocast, SDPA attention, fused AdamW, gradient clipping without a host sync, TF32 for what stays fp32. A variant says
what makes the model fast: `compile` is torch.compile, `reduce-overhead` the same with CUDA graphs, `liger` Liger's
kernels with its fused output layer and loss, uncompiled, because the two do not compile together (Liger 0.8.5). A CPU
has none of them. Prints the JSON object of bench.throughput with the variant and the versions of its packages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.throughput import add_plan_figures, base_parser, wait_for_turn

VARIANTS = {"compile": ("torch",), "reduce-overhead": ("torch",), "liger": ("torch", "liger-kernel")}  # and packages


def main() -> None:
    """Train the peer and print its figures."""
    parser = base_parser(__doc__ or "")
    parser.add_argument("--variant", choices=list(VARIANTS), default="compile")
    args = parser.parse_intermixed_args()
    from common.spec import RunSpec
    from recipes.resolve import resolve

    plan = resolve(RunSpec(recipe=args.recipe, overrides=tuple(args.overrides))).plan
    if plan.accelerator == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import transformers  # noqa: F401 - imported before waiting, as bench.throughput does

    versions = {name: version(name) for name in ("transformers", *VARIANTS[args.variant])}
    if args.variant == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2(fused_linear_cross_entropy=True, cross_entropy=False)

    waited = wait_for_turn(args.wait)
    result = add_plan_figures(_train(plan, args, waited), plan)
    print(json.dumps(result | {"variant": args.variant, "versions": versions}), flush=True)


def _build_model(plan: Any, device: str) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = plan.shape
    config = Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        max_position_embeddings=plan.seq_length,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=shape.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(1234)
    with torch.device(device):
        return Qwen2ForCausalLM(config).float().train()


def _read_batches(plan: Any, device: str) -> Iterator[Any]:
    """Consecutive windows of the corpus without end: int64[micro batch, seq + 1] on the device."""
    import numpy
    import torch

    from data.manifest import load_manifest

    folder = Path(plan.data)
    ids = numpy.memmap(folder / "train.bin", dtype=load_manifest(folder).dtype, mode="r")
    width, count = plan.seq_length + 1, plan.micro_batch_size
    while True:
        for at in range(0, len(ids) - count * width, count * width):
            window = torch.from_numpy(ids[at : at + count * width].astype("int64")).view(count, width)
            yield window.pin_memory().to(device, non_blocking=True) if device == "cuda" else window


def _train(plan: Any, args: Any, waited: float) -> dict[str, Any]:
    """Train and time; returns the figures. `waited` as in StopWatch."""
    import torch

    from bench.timing import StopWatch

    device = "cuda" if plan.accelerator == "gpu" else "cpu"
    torch.set_float32_matmul_precision("high")
    model = _build_model(plan, device)
    modes = {"compile": "default", "reduce-overhead": "reduce-overhead"}
    compiled = torch.compile(model, mode=modes[args.variant]) if device == "cuda" and args.variant in modes else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.max_lr, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1, fused=True
    )
    batches, accumulate = _read_batches(plan, device), plan.global_batch_size // plan.micro_batch_size
    watch, losses, done = StopWatch(args.warmup, args.steps), [], False
    while not done:
        total = torch.zeros((), device=device)
        for _ in range(accumulate):
            ids = next(batches)
            torch.compiler.cudagraph_mark_step_begin()  # the graphs of the last micro batch may be overwritten
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                # with shift_labels the loss counts all positions, as Megatron does
                loss = (
                    compiled(input_ids=ids[:, :-1], labels=ids[:, :-1], shift_labels=ids[:, 1:].contiguous()).loss
                    / accumulate
                )
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        done = watch.step()
    result = watch.result(args.steps * plan.tokens_per_step, waited)
    return result | ({"losses": [float(loss) for loss in losses]} if args.losses else {})


if __name__ == "__main__":
    main()
