"""The parts of the page that say what happened to the model: headline, domains, comparison, replay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from report.facts import Change, Replay, Speed, replay, replay_share, series, status, zero
from report.html import Html, el, figure, section, table
from report.passport import Passport
from report.read import RunFiles, finite
from report.theme import DASH_NAMES

CLASSES = {"learned": "learned", "forgotten": "forgotten", "not a number": "broken"}


@dataclass(frozen=True)
class Story:
    """All that the page is made of: one run, read and worked out, and those it is compared with."""

    files: RunFiles
    changes: list[Change]
    blend: list[Replay]
    speed: Speed
    warnings: list[str]
    passport: Passport
    svg: dict[str, str]
    against: list[tuple[RunFiles, list[Change]]]


def signed(value: float, digits: int = 2) -> str:
    """+0.42, or with a real minus sign."""
    return "NaN" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "\u2212")


def short(value: float | None, unit: str = "") -> str:
    """A number of three digits with a K, M, B or T; a dash for None."""
    if value is None:
        return "\u2014"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}{unit}"
    return f"{value:.3g}{unit}"


def duration(seconds: float | None) -> str:
    """2 h 05 min, 3 min 10 s, 12 s."""
    if seconds is None:
        return "\u2014"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def top(story: Story) -> list[object]:
    """Name, one sentence with the result, a card for each domain, the key facts, what to look at."""
    files = story.files
    kind = "Continual pretraining" if files.continued else "Training run"
    return [
        el(
            "header",
            el("div", f"{kind} · {status(files)}", class_="kind"),
            el("h1", files.run.name),
            headline(story.changes),
        ),
        el("div", [_card(c) for c in story.changes], class_="cards") if story.changes else None,
        _facts(story),
        el("ul", [el("li", text) for text in story.warnings], class_="warnings") if story.warnings else None,
    ]


def headline(changes: list[Change]) -> Html:
    """`prose +0.42 nats forgotten · code -1.31 nats learned`"""
    if not changes:
        return el("p", "No validation is recorded yet, so what was learned is not known.", class_="headline")
    parts: list[object] = []
    for c in changes:
        colour = CLASSES.get(c.verdict, "plain")
        value = el("b", f"{signed(c.delta)} nats {c.verdict}", class_=colour)
        parts += [" · " if parts else None, f"{c.domain} ", value]
    return el("p", parts, class_="headline")


def _card(c: Change) -> Html:
    pairs = [f"{c.base:.3f} \u2192 {c.now:.3f} nats a token"]
    if None not in c.perplexity:
        pairs.append(f"perplexity {short(c.perplexity[0])} \u2192 {short(c.perplexity[1])}")
    colour = CLASSES.get(c.verdict, "plain")
    return el(
        "div",
        el("div", c.domain, el("span", f" {c.role}", class_="role") if c.role else None, class_="name"),
        el("div", signed(c.delta), " ", el("small", c.verdict), class_=f"big {colour}"),
        [el("div", text, class_="more") for text in pairs],
        class_="card",
    )


def _facts(story: Story) -> Html:
    files, speed = story.files, story.speed
    losses = series(files.train, "loss")[1]
    tokens = series(files.train, "unmasked_tokens")[1]
    states = [item.state for item in story.passport.items]
    failed, unknown, held = states.count("fail"), states.count("unknown"), states.count("pass")
    detail = ", ".join(f"{n} {name}" for n, name in ((failed, "failed"), (unknown, "unknown")) if n) or "all hold"
    p50, p99 = speed.step_p50, speed.step_p99
    facts: list[tuple[str, str, str | None]] = [
        ("training loss", f"{losses[-1]:.3f}" if losses else "\u2014", f"from {losses[0]:.3f}" if losses else None),
        ("tokens trained", short(tokens[-1] if tokens else None), f"in {duration(speed.elapsed)}"),
        ("tokens a second", short(speed.tokens_per_second), "median"),
        ("step time, median", short(p50, " s"), f"p99 {short(p99, ' s')}"),
        ("peak memory", short(speed.memory, " GiB"), None),
        ("passport", f"{held} of {held + failed + unknown}", detail),
    ]
    shown = [(n, v, d) for n, v, d in facts if v != "\u2014" or n == "training loss"]
    return el(
        "dl", [el("div", el("dt", n), el("dd", v, el("small", d) if d else None)) for n, v, d in shown], class_="facts"
    )


def domains(story: Story) -> Html:
    """The centrepiece: the curve against the base, and the table under it."""
    if not story.changes:
        return Html("")
    largest = max((abs(c.delta) for c in story.changes if math.isfinite(c.delta)), default=0.0) or 1.0
    rows = [_domain_row(c, largest) for c in story.changes]
    origin = {"base": "the base model", "untrained model": "the untrained model"}.get(
        zero(story.files, story.changes), "the first validation"
    )
    then = "base" if origin == "the base model" else "start"
    head = ["domain", "", "difference", "%", then, "now", f"perplexity, {then}", "now", f"bits a byte, {then}", "now"]
    return section(
        "What was learned, what was forgotten",
        figure(story.svg.get("validation"), _validation_caption(story)),
        table(head, rows, class_="split"),
        about=f"Validation loss of each domain minus that of {origin}. Below zero the model predicts the domain better "
        "than before, above zero it has lost some of what it knew.",
    )


def _validation_caption(story: Story) -> str:
    if not story.against:
        return "One point a validation; differences in nats a token."
    names = labels([files for files, _ in runs(story)])
    lines = [f"{DASH_NAMES[i % len(DASH_NAMES)]}: {name}" for i, name in enumerate(names.values())]
    return f"One point a validation; {', '.join(lines)}."


def _domain_row(c: Change, largest: float) -> list[object]:
    colour = CLASSES.get(c.verdict, "plain")
    percent = signed(100 * c.delta / c.base, 1) + "%" if c.base else "\u2014"
    return [
        c.domain,
        el("td", _bar(c.delta / largest)),
        el("td", signed(c.delta, 3), class_=f"strong {colour}"),
        percent,
        f"{c.base:.3f}",
        f"{c.now:.3f}",
        *(short(v) for v in c.perplexity),
        *("\u2014" if v is None else f"{v:.3f}" for v in c.bits_per_byte),
    ]


def _bar(share: float) -> Html:
    """A bar from the middle: left learned, right forgotten."""
    width = 0.0 if math.isnan(share) else min(1.0, abs(share)) * 50
    return el("div", el("i", class_="l" if share < 0 else "f", style=f"width:{width:.1f}%"), class_="bar")


def runs(story: Story) -> list[tuple[RunFiles, list[Change]]]:
    """The run and those it is compared with."""
    return [(story.files, story.changes), *story.against]


def labels(several: list[RunFiles]) -> dict[str, str]:
    """By the share of replay where that tells the runs apart, else by name (path -> label)."""
    shares = [replay_share(files) for files in several]
    if None not in shares and len({f"{s:.0%}" for s in shares}) == len(several):
        return {f.run.path.as_posix(): f"{s:.0%} replay" for f, s in zip(several, shares, strict=True)}
    names = [files.run.name for files in several]
    return {f.run.path.as_posix(): f.run.name if names.count(f.run.name) == 1 else str(f.run.path) for f in several}


def comparison(story: Story) -> Html:
    """One row a run, one column a domain."""
    if not story.against:
        return Html("")
    names = list(dict.fromkeys(c.domain for _, changes in runs(story) for c in changes))
    rows = [_compared(files, {c.domain: c for c in changes}, names) for files, changes in runs(story)]
    return section(
        "Compared runs",
        table(["run", "replay", "step", *names], rows),
        about="Difference from each run's own base at its newest validation, in nats a token.",
    )


def _compared(files: RunFiles, changes: dict[str, Change], names: list[str]) -> list[object]:
    share, cells = replay_share(files), []
    for name in names:
        c = changes.get(name)
        colour = CLASSES.get(c.verdict, "plain") if c else "plain"
        cells.append(el("td", signed(c.delta, 3) if c else "\u2014", class_=f"strong {colour}"))
    step = max((c.step for c in changes.values()), default=None)
    return [
        files.run.name,
        "\u2014" if share is None else f"{share:.0%}",
        "\u2014" if step is None else f"{step:,}",
        *cells,
    ]


def consumption(story: Story) -> Html:
    """Replay plan against what was read."""
    if not story.blend:
        return Html("")

    def share(value: float | None) -> str:
        return "\u2014" if value is None else f"{value:.1%}"

    def epochs(value: float | None) -> str:
        return "\u2014" if value is None else f"{value:.2f}"

    rows = [
        [r.domain, r.role or "\u2014", short(r.planned), short(r.consumed), share(r.planned_share),
         share(r.consumed_share), epochs(r.planned_epochs), epochs(r.consumed_epochs)]
        for r in story.blend
    ]  # fmt: skip
    head = ["domain", "role", "tokens planned", "read", "share planned", "read", "epochs planned", "read"]
    total, wanted = finite(story.files.records["blend.json"].get("total_tokens")), replay_share(story.files)
    parts = [f"Planned: {share(wanted)} replay" if wanted is not None else "", f"{short(total)} tokens in all"]
    counted = any(r.consumed is not None for r in replay(story.files))
    return section(
        "Replay: plan and consumption",
        figure(story.svg.get("replay"), "Share of all tokens."),
        table(head, rows),
        about=", ".join(p for p in parts if p) + ("." if counted else "; consumption was not counted in this run."),
    )
