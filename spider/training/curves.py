"""Draw the curves of runs from their metrics.jsonl: `draw_curves`, `write_curves`.

    python -m spider.training.curves OUT.png "default=checkpoints" "three loops=checkpoints-3"

Every panel shows one quantity of all runs: the logged values as a thin line, their moving average as a thick one,
validation as dots. A run far above the others does not change the scale; an arrow at the upper edge gives its value.
Validation by source (`val_bpb/NAME`) has its own panel. matplotlib is imported only to draw.
"""

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from loguru import logger

from spider import console, files
from spider.errors import DataError, UsageError
from spider.flags import run_program
from spider.training.machine import quiet
from spider.training.metrics import read_lines

POINTS = 300                              # per curve, each a mean over equally many steps
SMOOTH = 1 / 40                           # of a curve, to each side of a point in its moving average
SOURCE = "val_bpb/"                       # prefix of a source's validation bits per byte
Points = list[tuple[float, float]]


class Panel(NamedTuple):
    """One quantity: its key in metrics.jsonl, and a factor."""
    title: str
    name: str
    factor: float = 1
    val: str = ""                         # key of its validation values, which are not smoothed
    smooth: bool = True


PANELS = (
    Panel("bits per byte", "loss", 1 / math.log(2), "val_bpb"),
    Panel("bytes per segment", "bytes_per_segment", val="val_bytes_per_segment"),
    Panel("loops until halting", "mean_loops"),
    Panel("learning rate", "lr", smooth=False),
    Panel("gradient norm", "grad_norm"),
    Panel("load of the busiest expert (1 is even)", "expert_balance"),
    Panel("bytes per second", "tok_per_sec"),
)
BY_SOURCE = "validation by source, bits per byte"


def read_metrics(path: Path) -> list[dict]:
    """Read the plotted numbers of each line of metrics.jsonl; return nothing if there is no such file."""
    wanted = {"step", "bytes_seen", *(name for panel in PANELS for name in (panel.name, panel.val))}
    return [{name: value for name, value in numbers.items() if (name in wanted or name.startswith(SOURCE))
             and type(value) in (int, float) and abs(value) < 1e30} for numbers in read_lines(path)]


def sources_of(runs: Iterable[list[dict]]) -> list[str]:
    """List the keys of validation by source, in order of appearance."""
    return list(dict.fromkeys(name for lines in runs for line in lines for name in line if name.startswith(SOURCE)))


def axis_of(runs: Iterable[list[dict]]) -> tuple[str, float, str]:
    """Choose the horizontal axis of some runs: key in metrics.jsonl, factor, title."""
    if all("bytes_seen" in line for lines in runs for line in lines):
        return "bytes_seen", 1e-6, "million bytes"
    return "step", 1, "steps"


def curve(lines: list[dict], axis: tuple[str, float, str], name: str, factor: float = 1) -> Points:
    """Return the values of `name` over the axis, at most POINTS, each the mean of equally many steps."""
    found = [(line[axis[0]] * axis[1], line[name] * factor) for line in lines if name in line]
    size = max(1, math.ceil(len(found) / POINTS))
    return [(part[-1][0], sum(value for _, value in part) / len(part))
            for part in (found[i:i + size] for i in range(0, len(found), size))]


def smoothed(points: Points) -> Points:
    """Return the moving average of a curve; the window is shorter near the start, where a loss falls steeply."""
    width = math.ceil(len(points) * SMOOTH)
    values = [value for _, value in points]
    spans = (values[max(0, i - min(width, i)):i + min(width, i) + 1] for i in range(len(points)))
    return [(x, sum(part) / len(part)) for (x, _), part in zip(points, spans)]


def span(runs: list[list[float]]) -> tuple[float, float]:
    """Return the limits of a vertical axis. They leave out a run's few largest values, since a loss starts high, and
    runs that are three times as high as the lower half of them."""
    ordered = [sorted(values) for values in runs if values]
    highs = sorted(values[-1 - len(values) // 25] for values in ordered)
    middle = highs[(len(highs) - 1) // 2]
    low, high = min(values[0] for values in ordered), max(high for high in highs if high <= middle + 2 * abs(middle))
    low = min(low, high)
    room = max((high - low) * 0.06, abs(high) * 0.01) or 1.0      # do not zoom into the rounding of a constant
    return low - room, high + room


def draw_curves(out: Path, runs: dict[str, list[dict]]):
    """Draw lines of metrics.jsonl by label into a PNG; raise ImportError without matplotlib."""
    from matplotlib.figure import Figure
    axis, sources = axis_of(runs.values()), sources_of(runs.values())
    figure = Figure(figsize=(14, 6.4))
    figure.subplots_adjust(0.04, 0.08, 0.99, 0.94, wspace=0.2, hspace=0.34)  # automatic layouts double the time
    grid = figure.add_gridspec(2, 4)
    cells = [grid[0, 0] if sources else grid[0, :2], *([grid[0, 1]] if sources else []), grid[0, 2], grid[0, 3],
             *(grid[1, i] for i in range(4))]
    panels = [*PANELS[:1], *([None] if sources else []), *PANELS[1:]]
    for cell, panel in zip(cells, panels):
        axes = figure.add_subplot(cell)
        curves = draw_sources(axes, runs, axis, sources) if panel is None else draw_panel(axes, runs, axis, panel)
        axes.set_title(BY_SOURCE if panel is None else panel.title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.ticklabel_format(axis="y", scilimits=(-2, 5))
        axes.set_xlabel(axis[2] if cell.rowspan.start else "")
        if any(points for _, points in curves):
            axes.set_ylim(*span([[value for _, value in points] for _, points in curves]))
            point_out_of_scale(axes, curves)
    labels = {f"run {number}": label for number, label in enumerate(runs)}
    labels |= {f"source {number}": name.removeprefix(SOURCE) for number, name in enumerate(sources)}
    for axes in figure.axes[:1 + bool(sources)]:
        for text in axes.legend(fontsize=9).get_texts():          # replaced here: matplotlib interprets $ and leading _
            text.set(text=console.one_line(labels.get(text.get_text(), text.get_text())), parse_math=False)
    with files.durable(out, "wb") as file:
        figure.savefig(file, dpi=90, format="png")


def draw_panel(axes, runs: dict[str, list[dict]], axis: tuple[str, float, str],
               panel: Panel) -> list[tuple[str, Points]]:
    """Draw a panel's curves, one color per run; return color and points of each run."""
    drawn = []
    for number, lines in enumerate(runs.values()):
        line, dots = curve(lines, axis, panel.name, panel.factor), curve(lines, axis, panel.val)
        if panel.smooth:
            axes.plot(*zip(*line or [((), ())]), lw=0.7, alpha=0.35, color=f"C{number}")
        axes.plot(*zip(*(smoothed(line) if panel.smooth else line) or [((), ())]), lw=1.4, color=f"C{number}",
                  label=f"run {number}")
        axes.plot(*zip(*dots or [((), ())]), "o", ms=4, color=f"C{number}", mec="black", mew=0.6,
                  label=None if number else "validation")
        drawn.append((f"C{number}", dots + line))
    return drawn


def draw_sources(axes, runs: dict[str, list[dict]], axis: tuple[str, float, str],
                 sources: list[str]) -> list[tuple[str, Points]]:
    """Draw validation by source, one color per source, one line style per run; return color and points of each
    curve."""
    drawn = []
    for stroke, lines in zip("o- s-- ^: v-.".split() * len(runs), runs.values()):
        for number, name in enumerate(sources):
            points = curve(lines, axis, name)
            axes.plot(*zip(*points or [((), ())]), stroke, ms=3, lw=1, color=f"C{number}",
                      label=None if lines is not next(iter(runs.values())) else f"source {number}")
            drawn.append((f"C{number}", points))
    return drawn


def point_out_of_scale(axes, curves: list[tuple[str, Points]]):
    """Write the last value of each curve that ends above the panel at its upper edge, in the curve's color."""
    high = axes.get_ylim()[1]
    above = [(colour, points[-1][1]) for colour, points in curves if points and points[-1][1] > high]
    for row, (colour, value) in enumerate(above):
        axes.text(0.99, 0.97 - 0.08 * row, f"\u2191 {value:.4g}", color=colour, fontsize=9, ha="right", va="top",
                  transform=axes.transAxes)


def write_curves(directory: Path, signal: int | None):
    """Draw curves.png beside a run's metrics at its end, if matplotlib is installed. After a signal do not, since the
    remaining time is for saving."""
    try:
        if signal is None and (lines := read_metrics(directory / "metrics.jsonl")):
            with quiet():
                draw_curves(directory / "curves.png", {"training": lines})
            logger.info(f"curves: {directory / 'curves.png'}")
    except ModuleNotFoundError:
        pass
    except Exception as fault:            # broken installation or full disk, which must not fail the run
        logger.warning(f"could not draw curves.png: {fault}")


def main(argv: list[str]) -> int:
    """Draw the curves of several runs in one picture. Exit status: 0, or 2 with one line on stderr."""
    def command():
        if argv in (["-h"], ["--help"]):
            return print(__doc__)
        out, *runs = argv or [""]
        directories = {label: directory for label, _, directory in (run.partition("=") for run in runs)}
        if not out or not runs or not all(map(all, directories.items())) or len(directories) < len(runs):
            raise UsageError("usage: python -m spider.training.curves OUT.png LABEL=DIR ..., with unique LABELs, and a "
                             "metrics.jsonl in each DIR")
        found = {label: read_metrics(Path(directory) / "metrics.jsonl") for label, directory in directories.items()}
        if missing := [label for label, lines in found.items() if not lines]:
            raise DataError(f"{', '.join(missing)}: no metrics.jsonl, or no lines in it")
        try:
            with quiet():                 # warnings of characters that the font lacks
                draw_curves(Path(out), found)
        except ImportError as fault:
            raise UsageError(f'{fault}: pip install -e ".[bench]"') from None
    return run_program(command, "curves.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
