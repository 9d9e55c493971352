"""The style of the figures, and their conversion to SVG inside the page (in its colours) and to PNG."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# the page replaces these three by its own colours, so that figures are readable in light and in dark mode
INK, MUTED, RULE = "#1c2128", "#6b7381", "#dfe3e9"
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)"}
LEARNED, FORGOTTEN = "#2a9d6f", "#d1495b"
PALETTE = ("#3b82c4", "#d9811f", "#8b6cc9", "#1fa2a6", "#c9609f", "#8a9a3b", "#7a8793", "#b0683a")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1, 2)))
DASH_NAMES = ("solid", "dashed", "dotted", "dash-dotted")

STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
}


@contextlib.contextmanager
def figure_style() -> Iterator[None]:
    """The style of everything drawn and saved inside the block."""
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has the glyph; the PNG shows a box
        yield


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of that size in inches, without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def tick(value: float) -> str:
    """1,000 and 0.5 as they are, 3e-4 for very small values."""
    if value and abs(value) < 0.005:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "\u2212")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def signed_tick(value: float, digits: int | None = None) -> str:
    """+0.5, or with a real minus sign."""
    text = f"{value:+.3g}" if digits is None else f"{value:+.{digits}f}"
    return text.replace("-", "\u2212")


def thousands(axis: Any) -> None:
    """Ticks as 1,000."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def thin_out(
    steps: Sequence[float], values: Sequence[float], most: int = 1200
) -> tuple[Sequence[float], Sequence[float]]:
    """About `most` points at most: the lowest and the highest of each stretch, so that no spike disappears."""
    if len(values) <= most:
        return steps, values
    width = 2 * len(values) / most
    kept: set[int] = {0, len(values) - 1}
    for bucket in range(most // 2):
        part = range(int(bucket * width), min(len(values), int((bucket + 1) * width)))
        if part:
            kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    order = sorted(kept)
    return [steps[i] for i in order], [values[i] for i in order]


def label_ends(axes: Axes, ends: list[tuple[float, str, str]], gap: float = 0.06) -> None:
    """Write labels to the right of the axes at the height of their curves' ends, moved apart where they would overlap.

    Args:
        ends: (y, text, colour) of each label.
        gap: least distance between two labels, as a share of the axes' height.
    """
    low, high = axes.get_ylim()
    placed = sorted(((y - low) / (high - low), text, colour) for y, text, colour in ends)
    heights: list[float] = []
    for height, _, _ in placed:
        heights.append(max(height, heights[-1] + gap) if heights else height)
    surplus = max(0.0, heights[-1] - 1.0) if heights else 0.0
    for height, (_, text, colour) in zip(heights, placed, strict=True):
        at = height - surplus
        axes.text(1.012, at, text, color=colour, transform=axes.transAxes, va="center", fontweight="bold")


def to_svg(figure: Figure, name: str, class_: str = "") -> str:
    """SVG for inside an HTML page: no prologue, no namespaces, ids that are unique on the page, the page's colours.

    Args:
        name: what the figure shows; with `class_` unique on the page.
        class_: CSS class, such as "wide".
    """
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, body = text.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    prefix = f"{name}-{class_}" if class_ else name
    body = re.sub(r' id="([^"]+)"', rf' id="{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', body)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    return f'<svg class="{class_}" {view.group(0) if view else ""} role="img" aria-label="{name}">{body}'


def to_png(figure: Figure, path: Path) -> None:
    """The same figure on white, for slides and messages."""
    figure.savefig(path, dpi=144, facecolor="white")
