"""Draw the curves of runs from their metrics.jsonl.

    python -m spider.curves OUT.png checkpoints/a checkpoints/b
    python -m spider.curves OUT.png "default=checkpoints/a" "three loops=checkpoints/b"

    charts_of      what is drawn of a run, as plain values
    draw_curves    draw runs into a picture
    write_curves   draw curves.png at a run's end

Every chart shows one quantity over the bytes seen: the logged values as a thin line, their moving
average as a thick one, validation as dots; vertical lines are the beginnings of epochs. Only charts
with data are drawn. matplotlib is imported only to draw.
"""

import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from loguru import logger

from spider.common import UsageError, durable, one_line, run_program
from spider.machine import quiet
from spider.run import read_lines

POINTS = 300  # per curve, each a mean over equally many steps
SMOOTH = 1 / 40  # of a curve, to each side of a point in its moving average
EPOCHS = 30  # the beginnings of more are not marked


class Point(NamedTuple):
    x: float  # million bytes
    y: float


class Curve(NamedTuple):
    style: str  # key of STYLES
    label: str
    points: list[Point]

    @property
    def values(self) -> list[float]:
        return [point.y for point in self.points]


Charts = dict[str, list[Curve]]  # of one run, by title


class Chart(NamedTuple):
    """A row of the table of charts."""

    title: str
    name: str  # key in metrics.jsonl
    factor: float = 1  # by which its values are multiplied
    validation: str | None = None  # key of the validation values


BITS = "bits per byte"
LOOPS = "loops until halting"
CHARTS = (
    Chart(BITS, "loss", 1 / math.log(2), "val_bpb"),
    Chart("bytes per segment", "bytes_per_segment", validation="val_bytes_per_segment"),
    Chart(LOOPS, "mean_loops"),
    Chart("learning rate", "lr"),
    Chart("gradient norm", "grad_norm"),
    Chart("load of the busiest expert (1 is even)", "expert_balance"),
    Chart("bytes per second", "tok_per_sec"),
)
BY_SOURCE = "validation by source, bits per byte"
SOURCE = "val_bpb/"  # prefix of its keys

STYLES: dict[str, dict[str, Any]] = {
    "raw": {"lw": 0.7, "alpha": 0.35},
    "line": {"lw": 1.4},
    "dot": {"marker": "o", "ms": 4, "ls": ""},
    "epoch": {"lw": 0.8, "ls": ":"},
}
GREY = "0.4"
PANELS = 4  # at most, side by side
PANEL = (3.6, 3.1)  # inches

# --------------------------------------------------------------------------------------------------
# What is drawn


def read_metrics(path: Path) -> list[dict]:
    """Read the finite numbers of each line of metrics.jsonl; return nothing if there is no such
    file."""
    return [finite(line) for line in read_lines(path) if line.get("bytes_seen")]


def finite(line: dict) -> dict:
    """Return a line without the numbers that were not finite."""
    return {name: value for name, value in line.items() if value is not None}


def charts_of(lines: list[dict]) -> Charts:
    """Return the curves of a run by title of their chart. Curves without points are left out, and
    charts without curves."""
    charts: Charts = {}
    for chart in CHARTS:
        raw = points_of(lines, chart.name, chart.factor)
        charts[chart.title] = [
            Curve("raw", "", raw),
            Curve("dot", "validation", points_of(lines, chart.validation)),
            Curve("line", "training", smoothed(raw)),
        ]
    charts[BY_SOURCE] = []
    for name in source_names(lines):
        label = one_line(name.removeprefix(SOURCE))
        charts[BY_SOURCE].append(Curve("line", label, points_of(lines, name)))

    drawn = {}
    for title, curves in charts.items():
        with_points = [curve for curve in curves if curve.points]
        if with_points:
            drawn[title] = with_points
    return drawn


def source_names(lines: list[dict]) -> list[str]:
    """Return the keys of sources' validation in metrics.jsonl, in their order there."""
    names: dict[str, None] = {}  # an ordered set
    for line in lines:
        names |= dict.fromkeys(name for name in line if name.startswith(SOURCE))
    return list(names)


def points_of(lines: list[dict], name: str | None, factor: float = 1) -> list[Point]:
    """Return the values of `name` over million bytes, at most POINTS, each the mean of equally many
    steps."""
    values = [
        Point(line["bytes_seen"] / 1e6, line[name] * factor) for line in lines if name in line
    ]
    size = max(1, math.ceil(len(values) / POINTS))
    points = []
    for first in range(0, len(values), size):
        group = values[first : first + size]
        points.append(Point(group[-1].x, mean_of(group)))
    return points


def smoothed(points: list[Point]) -> list[Point]:
    """Return the moving average of a curve. The window is shorter near the start, where a loss
    falls steeply."""
    longest = math.ceil(len(points) * SMOOTH)
    found = []
    for i, point in enumerate(points):
        reach = min(i, longest)
        found.append(Point(point.x, mean_of(points[i - reach : i + reach + 1])))
    return found


def mean_of(points: list[Point]) -> float:
    return sum(point.y for point in points) / len(points)


def titles_of(runs: list[Charts]) -> list[str]:
    """Return the titles of the charts that are drawn: those that any run has, but loops only if
    they vary."""
    available = set().union(*runs)
    titles = [chart.title for chart in CHARTS] + [BY_SOURCE]
    titles = [title for title in titles if title in available]
    loops = []
    for run in runs:
        for curve in run.get(LOOPS, ()):
            loops += curve.values
    if loops and max(loops) - min(loops) < 0.005:
        titles.remove(LOOPS)
    return titles


def beginnings(lines: list[dict]) -> list[float]:
    """Return after how many million bytes each epoch but the first begins; nothing for more than
    EPOCHS of them."""
    starts = []
    for before, line in zip(lines, lines[1:], strict=False):
        if line.get("epoch", 0) > before.get("epoch", 0):
            starts.append(before["bytes_seen"] / 1e6)
    return starts if len(starts) <= EPOCHS else []


def final_numbers(title: str, curves: list[Curve]) -> str:
    """Format the last values of a run's chart. Of a loss, add the lowest one of validation, if that
    is not the last."""
    by_label = {curve.label: curve.values for curve in curves}
    training = by_label.get("training")
    validation = by_label.get("validation")
    if validation is None:
        if training is None:
            return ""
        return f"{training[-1]:.4g}"
    text = f"validation {validation[-1]:.4g}"
    if title == BITS and min(validation) < validation[-1]:
        text += f" (lowest {min(validation):.4g})"
    if training is not None:
        text = f"training {training[-1]:.4g}, {text}"
    return text


def span(curves: list[list[Point]]) -> tuple[float, float]:
    """Return the limits of a vertical axis. They leave out the few largest values, since a loss
    starts high."""
    values = sorted(point.y for points in curves for point in points)
    low = values[0]
    high = values[-1 - len(values) // 25]
    # do not zoom into the rounding of a constant
    room = max((high - low) * 0.06, abs(high) * 0.01)
    if room == 0:  # a curve of zeros
        room = 1.0
    return low - room, high + room


# --------------------------------------------------------------------------------------------------
# Drawing


def draw_curves(out: Path, runs: dict[str, list[dict]]):
    """Draw lines of metrics.jsonl by label into a PNG, a color per run; raise ImportError without
    matplotlib."""
    charts = {run: charts_of(lines) for run, lines in runs.items()}
    epochs = [beginnings(lines) for lines in runs.values()]
    titles = titles_of(list(charts.values()))
    columns = max(1, min(PANELS, math.ceil(len(titles) / 2)))
    rows = max(1, math.ceil(len(titles) / columns))
    figure = empty_figure(rows, columns, len(runs))
    for number, title in enumerate(titles, 1):
        axes = figure.add_subplot(rows, columns, number, xlabel="million bytes")
        if title == BY_SOURCE:
            draw_sources(axes, charts)
        else:
            draw_chart(axes, title, charts)
        mark_epochs(axes, epochs)
    draw_legends(figure, charts, has_epochs=any(epochs))
    with durable(out, "wb") as file:
        figure.savefig(file, dpi=90, format="png")


def empty_figure(rows: int, columns: int, runs: int):
    """Make a figure with room for panels, and for legends above them."""
    from matplotlib.figure import Figure

    legends = 0.75 if runs == 1 else 0.55 + 0.25 * runs  # inches
    width = PANEL[0] * columns
    height = PANEL[1] * rows + legends
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(  # automatic layouts double the time
        left=0.6 / width,
        right=1 - 0.15 / width,
        bottom=0.5 / height,
        top=1 - legends / height,
        wspace=0.24,
        hspace=0.36,
    )
    return figure


def mark_epochs(axes, epochs: list[list[float]]):
    """Mark the beginnings of epochs of each run."""
    for number, starts in enumerate(epochs):
        color = GREY if len(epochs) == 1 else f"C{number}"
        for start in starts:
            axes.axvline(start, color=color, zorder=0, **STYLES["epoch"])


def draw_chart(axes, title: str, charts: dict[str, Charts]):
    """Draw the curves of all runs that have a chart. Of a single run, the heading has the last
    values."""
    drawn = []
    for color, run in enumerate(charts.values()):
        for curve in run.get(title, ()):
            plot(axes, curve, color)
            drawn.append(curve.points)
    axes.set_ylim(*span(drawn))
    heading = title
    if len(charts) == 1:
        (run,) = charts.values()
        heading = f"{title}\n{final_numbers(title, run[title])}"
    axes.set_title(heading, fontsize="medium")


def draw_sources(axes, charts: dict[str, Charts]):
    """Draw the validation of each source, a color per source and run, with a legend above the
    curves."""
    drawn: list[list[Point]] = []
    for run, of_run in charts.items():
        for curve in of_run.get(BY_SOURCE, ()):
            label = f"{curve.label}: {curve.points[-1].y:.4g}"
            if len(charts) > 1:
                label = f"{run} {label}"
            plot(axes, curve, color=len(drawn), label=label)
            drawn.append(curve.points)
    low, high = span(drawn)
    axes.set_ylim(low, high + (high - low) * 0.09 * len(drawn))
    axes.legend(loc="upper right", fontsize="small")
    axes.set_title(BY_SOURCE, fontsize="medium")


def plot(axes, curve: Curve, color: int, label: str = ""):
    """Draw a curve. A line of one point would be invisible, so that is a dot."""
    style = STYLES[curve.style] if len(curve.points) > 1 else STYLES["dot"]
    x, y = np.transpose(curve.points)
    axes.plot(x, y, color=f"C{color}", label=plain(label), **style)


def draw_legends(figure, charts: dict[str, Charts], has_epochs: bool):
    """Draw the legends above all charts: of styles, and of several runs their colors and last
    losses."""
    from matplotlib.lines import Line2D

    def key(label: str, color: str, **style) -> Line2D:
        return Line2D([], [], color=color, label=label, **style)

    styles = [key("training", GREY, **STYLES["line"]), key("validation", GREY, **STYLES["dot"])]
    if has_epochs:
        styles.append(key("an epoch begins", GREY, **STYLES["epoch"]))
    figure.legend(handles=styles, loc="upper left", ncols=len(styles), frameon=False)
    if len(charts) > 1:
        runs = []
        for color, (run, of_run) in enumerate(charts.items()):
            label = f"{run}: {final_numbers(BITS, of_run.get(BITS, []))}"
            runs.append(key(plain(label), f"C{color}", lw=3))
        figure.legend(handles=runs, loc="upper right", frameon=False)


def plain(text: str) -> str:
    """Escape control characters, and the $ that matplotlib would interpret."""
    return one_line(text).strip().replace("$", r"\$")


# --------------------------------------------------------------------------------------------------
# At a run's end, and as a command


def write_curves(directory: Path, signal: int | None):
    """Draw curves.png at a run's end, if matplotlib is installed; not after a signal, when time is
    for saving."""
    if signal is not None:
        return
    try:
        lines = read_metrics(directory / "metrics.jsonl")
        if lines:
            with quiet():
                draw_curves(directory / "curves.png", {"": lines})
            logger.info(f"curves: {directory / 'curves.png'}")
    except ModuleNotFoundError:
        pass
    except Exception as fault:  # broken installation or full disk, which must not fail the run
        logger.warning(f"could not draw curves.png: {fault}")


def labelled(argument: str) -> tuple[str, Path]:
    """Split LABEL=DIR. A directory without a label has its name for one, also if there is a = in
    its name."""
    label, equals, directory = argument.partition("=")
    if os.path.isdir(argument) or not equals:
        return Path(argument).resolve().name, Path(argument)
    return label, Path(directory)


def main(argv: list[str]) -> int:
    """Draw the curves of several runs in one picture. Exit status: 0, or 2 with one line on
    stderr."""

    def command():
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError('matplotlib is not installed: pip install -e ".[plot]"')
        if len(argv) < 2:
            raise UsageError("usage: python -m spider.curves OUT.png [LABEL=]DIR ...")
        out, *arguments = argv
        runs: dict[str, list[dict]] = {}
        for argument in arguments:
            label, directory = labelled(argument)
            lines = read_metrics(directory / "metrics.jsonl")
            if not lines:
                raise UsageError(f"{directory}: there is no metrics.jsonl with steps in it")
            runs[argument if label in runs else label] = lines
        with quiet():  # warnings of characters that the font lacks
            draw_curves(Path(out), runs)

    return run_program(command, "curves.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
