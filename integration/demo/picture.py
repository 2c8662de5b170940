"""The comparison as a picture: time to first token in the four cases."""

from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from kvplugin.integration.demo.results import Case, Comparison
from kvplugin.integration.demo.table import milliseconds, verdict

INK: Final = "#22303c"
FAINT: Final = "#66727e"
GREY: Final = "#a9b4bf"
ACCENT: Final = "#16808f"


class Bar(NamedTuple):
    """One case: its name, what happens in it, and its times in seconds."""

    name: str
    explanation: str
    colour: str
    times_s: list[float]


def bars(comparison: Comparison) -> list[Bar]:
    """The cases that occurred, from top to bottom."""
    without = comparison.without.ttft_s
    with_kvplugin = comparison.with_kvplugin.ttft_s
    every = (
        Bar("Cold", "first visit to a document", GREY, without(Case.COLD)),
        Bar(
            "Recomputed",
            "evicted, then computed again",
            GREY,
            without(Case.RECOMPUTED),
        ),
        Bar(
            "Loaded by kvplugin",
            "evicted, then back from CPU memory",
            ACCENT,
            with_kvplugin(Case.LOADED),
        ),
        Bar(
            "Local hit",
            "still in vLLM's own cache",
            GREY,
            with_kvplugin(Case.LOCAL),
        ),
    )
    return [bar for bar in every if bar.times_s]


def draw(comparison: Comparison, folder: Path) -> list[Path]:
    """Draw the picture as `ttft.svg` and `ttft.png`.

    Args:
        comparison: what to draw.
        folder: exists; files of these names are overwritten.

    Returns:
        The two files.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), facecolor="white")
    # Left of the axes is room for the names, above it for the titles.
    _draw_bars(figure.add_axes((0.30, 0.11, 0.67, 0.65)), bars(comparison))
    titles = [
        (0.905, "Time to first token", 16, INK, "bold"),
        (0.825, verdict(comparison), 10.5, ACCENT, "normal"),
        (
            0.03,
            f"{comparison.title}. Bars: medians. Dots: answers.",
            8,
            FAINT,
            "normal",
        ),
    ]
    for height, text, size, colour, weight in titles:
        figure.text(0.03, height, text, size=size, color=colour, weight=weight)
    files = [folder / "ttft.svg", folder / "ttft.png"]
    for file in files:
        figure.savefig(file, dpi=160)
    return files


def _draw_bars(axes: Any, shown: list[Bar]) -> None:
    longest = max(max(bar.times_s) for bar in shown)
    gap = 0.018 * longest
    for row, bar in enumerate(shown):
        middle = median(bar.times_s)
        axes.barh(row, middle, height=0.5, color=bar.colour)
        axes.scatter(bar.times_s, [row] * len(bar.times_s), s=14, color=INK, alpha=0.35)
        axes.text(
            max(bar.times_s) + gap,
            row,
            milliseconds(middle),
            va="center",
            size=12,
            weight="bold",
            color=ACCENT if bar.colour == ACCENT else INK,
        )
        axes.text(-gap, row - 0.05, bar.name, ha="right", weight="bold", color=INK)
        axes.text(-gap, row + 0.22, bar.explanation, ha="right", size=8.5, color=FAINT)
    # The first bar is at the top; room at the right for its label.
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, 1.16 * longest)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(GREY)
