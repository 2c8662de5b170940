"""Hit rate against capacity, a line a policy."""

from pathlib import Path
from typing import Final

from kvplugin.errors import ConfigError, unknown_name
from kvplugin.replay.result import ReplayResult

_INCHES: Final = (7.0, 4.5)
_DPI: Final = 150

_NEEDS_TEX: Final = {"pgf"}
"""Formats that matplotlib writes with a TeX that may not be there."""


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before there is anything to draw.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the suffix, or there
            is no such folder.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib: pip install 'kvplugin[plot]'"
        ) from None
    known = Figure().canvas.get_supported_filetypes().keys() - _NEEDS_TEX
    if _suffix(path) not in known:
        raise unknown_name("suffix", _suffix(path), known, f"picture {path}")
    if not path.parent.is_dir():
        raise ConfigError(f"picture {path}: there is no folder {path.parent}")


def draw(result: ReplayResult, path: Path) -> None:
    """Write the picture; the suffix says in which format.

    Raises:
        ConfigError: as `check_picture` does, or the file cannot be written.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(run.policy for run in result.runs):
        runs = [run for run in result.runs if run.policy == policy]
        runs.sort(key=lambda run: run.capacity)
        axes.plot(
            [run.capacity for run in runs],
            [100 * run.counts.block_rate for run in runs],
            marker="o",
            linestyle="--" if runs[0].is_reference else "-",
            label=policy,
        )
    if result.ceiling is not None:
        rate = 100 * result.ceiling.block_rate
        axes.axhline(rate, color="grey", linestyle=":", label="unbounded")
    axes.set_xscale("log")
    capacities = sorted({run.capacity for run in result.runs})
    axes.set_xticks(capacities, [f"{capacity:,}" for capacity in capacities])
    axes.minorticks_off()
    axes.set_xlabel(f"capacity (blocks of {result.block_size} tokens)")
    axes.set_ylabel("blocks hit (%)")
    axes.set_ylim(bottom=0)
    axes.set_title(result.trace)
    axes.legend()
    try:
        figure.savefig(path, dpi=_DPI, format=_suffix(path))
    except OSError as error:
        raise ConfigError(f"picture {path}: {error}") from error


def _suffix(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()
