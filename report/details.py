"""The parts of the page that say how it was run: curves, speed, passport, configuration, environment, command."""

from __future__ import annotations

from typing import Any

from report.html import Html, el, figure, section, table
from report.page import Story, short
from report.passport import Item
from report.read import RunFiles, finite

MODEL = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")


def curves(story: Story) -> Html:
    """Loss and what drives it."""
    svg = story.svg
    return section(
        "Training",
        figure(svg.get("loss"), "Training loss: every logged step (pale) and the average around it."),
        _pair(
            figure(svg.get("lr"), "Learning rate."),
            figure(svg.get("grad_norm"), "Gradient norm before clipping."),
        ),
    )


def performance(story: Story) -> Html:
    """Throughput and memory."""
    svg, speed = story.svg, story.speed
    about = (
        f"Median {short(speed.tokens_per_second)} tokens/s of all ranks; a step takes {short(speed.step_p50, ' s')} "
        f"(median) and {short(speed.step_p99, ' s')} (99th percentile). The first logged interval is left out."
    )
    shown = _pair(
        figure(svg.get("throughput"), "Tokens a second."),
        figure(svg.get("memory"), "Memory, GiB."),
    )
    return section("Throughput and memory", shown, about=about)


def _pair(*children: Html | None) -> Html | None:
    """Side by side where the page is wide enough."""
    return el("div", children, class_="pair") if any(children) else None


def passport(story: Story) -> Html:
    """Each item with its state."""
    rows = [[i.name, el("td", _state(i)), i.expected, i.found] for i in story.passport.items]
    about = [
        "Green holds, red does not. Grey could not be checked: it does not fail the run, but it fails ",
        el("code", "launch.py passport --strict"),
        ". Items that do not apply to this kind of run do not count.",
    ]
    return section("Passport", table(["item", "", "expected", "found"], rows, class_="text"), about=about)


def _state(item: Item) -> Html:
    return el("span", item.state, class_="state " + {"not applicable": "na"}.get(item.state, item.state))


def numbers(story: Story) -> Html:
    """Model, batch and schedule as resolved."""
    files = story.files
    groups = {"Model": _model(files), "Batch": _batch(files), "Schedule": _schedule(files)}
    base = files.records.get("base.json")
    if base:
        groups["Base"] = [(k, base[k]) for k in ("source", "checkpoint", "fingerprint") if k in base]
    shown = {title: [(k, _shown(v)) for k, v in rows if v is not None] for title, rows in groups.items()}
    return section(
        "Configuration",
        _pair(*(el("div", el("h3", title), table([], rows, "text")) for title, rows in shown.items() if rows)),
        about="As resolved: overrides applied. The whole of it is in config.yaml.",
    )


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _model(files: RunFiles) -> list[tuple[str, Any]]:
    gates = files.records.get("gates.json", {})
    tied = files.at("model.config.share_embeddings_and_output_weights")
    parameters = finite(gates.get("parameters"))
    return [
        ("parameters", None if parameters is None else f"{parameters:,.0f}"),
        *((name.replace("_", " "), files.at(f"model.config.{name}")) for name in MODEL),
        ("embeddings", None if tied is None else "tied" if tied else "untied"),
        ("precision", files.at("trainer.plugins.precision")),
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
        ("tokens a step", f"{tokens:,.0f}" if tokens else None),
        ("steps", f"{steps:,.0f}" if steps else None),
        ("tokens in all", f"{tokens * steps:,.0f}" if tokens and steps else None),
        ("devices", files.at("trainer.devices")),
        ("nodes", files.at("trainer.num_nodes")),
    ]


def _schedule(files: RunFiles) -> list[tuple[str, Any]]:
    scheduler, config = files.at("optim.lr_scheduler", {}), files.at("optim.config", {})
    scheduler, config = (x if isinstance(x, dict) else {} for x in (scheduler, config))
    kind = str(scheduler.get("_target_", "")).rpartition(".")[2]
    given = [(k.replace("_", " "), v) for k, v in scheduler.items() if not k.startswith("_")]
    wanted = ("lr", "optimizer", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
    return [("schedule", kind or None), *given, *((k.replace("_", " "), config.get(k)) for k in wanted)]


def environment(story: Story) -> Html:
    """Who set which variable, and why."""
    keys = ("key", "value", "source", "reason")
    rows = [[el("code", row.get("key")), *(row.get(key, "") for key in keys[1:])] for row in story.files.env]
    head = ["variable", "value", "set by", "reason"]
    return section("Environment", table(head, rows, class_="text") if rows else None)


def origin(story: Story) -> Html:
    """What to type, on which code."""
    files = story.files
    return section(
        "Command and version",
        el("pre", files.command) if files.command else None,
        el("p", "code version ", el("code", files.version), class_="about") if files.version else None,
    )
