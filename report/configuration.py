"""Tables of the resolved configuration: (name, value) rows of model, batch, schedule and base model."""

from __future__ import annotations

from typing import Any

from report.read import RunFiles, finite

Table = list[tuple[str, str]]

SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")
_FP8 = {"gate and up": "fp8", "output layer": "fp8_lm_head"}  # shown name -> lever, in the forward pass
OPTIMIZER = ("lr", "optimizer", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")


def configuration_tables(files: RunFiles) -> dict[str, Table]:
    """Title -> rows; values that are not recorded are left out, and so are empty tables."""
    base = files.records.get("base.json", {})
    tables = {
        "Model": _model(files),
        "Batch": _batch(files),
        "Schedule": _schedule(files),
        "Base model": [(key, base.get(key)) for key in ("source", "checkpoint", "fingerprint")],
    }
    shown = {title: [(k, _format(v)) for k, v in rows if v is not None] for title, rows in tables.items()}
    return {title: rows for title, rows in shown.items() if rows}


def _format(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _model(files: RunFiles) -> list[tuple[str, Any]]:
    tied = files.at("model.config.share_embeddings_and_output_weights")
    rounded = [name for name, lever in _FP8.items() if files.at(f"speed.{lever}") is True]
    parameters = finite(files.records.get("gates.json", {}).get("parameters"))
    return [
        ("parameters", None if parameters is None else f"{parameters:,.0f}"),
        *((name.replace("_", " "), files.at(f"model.config.{name}")) for name in SHAPE),
        ("embeddings", None if tied is None else "tied" if tied else "untied"),
        ("precision", files.at("trainer.plugins.precision")),
        ("operands in FP8", ", ".join(rounded) or None),
    ]


def _batch(files: RunFiles) -> list[tuple[str, Any]]:
    length, batch, steps = (
        finite(files.at(path)) for path in ("data.seq_length", "data.global_batch_size", "trainer.max_steps")
    )
    tokens = length * batch if length and batch else None
    return [
        ("sequence length", f"{length:,.0f} tokens" if length else None),
        ("micro batch", files.at("data.micro_batch_size")),
        ("global batch", f"{batch:,.0f} samples" if batch else None),
        ("tokens per step", f"{tokens:,.0f}" if tokens else None),
        ("steps", f"{steps:,.0f}" if steps else None),
        ("tokens in total", f"{tokens * steps:,.0f}" if tokens and steps else None),
        ("devices per node", files.at("trainer.devices")),
        ("nodes", files.at("trainer.num_nodes")),
    ]


def _schedule(files: RunFiles) -> list[tuple[str, Any]]:
    scheduler, optimizer = files.at("optim.lr_scheduler", {}), files.at("optim.config", {})
    scheduler, optimizer = (found if isinstance(found, dict) else {} for found in (scheduler, optimizer))
    name = str(scheduler.get("_target_", "")).rpartition(".")[2]
    arguments = [(k.replace("_", " "), v) for k, v in scheduler.items() if not k.startswith("_")]
    return [
        ("schedule", name or None),
        *arguments,
        *((key.replace("_", " "), optimizer.get(key)) for key in OPTIMIZER),
    ]
