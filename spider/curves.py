"""Draw the curves of runs from their metrics.jsonl.

    python -m spider.curves OUT.png checkpoints/a checkpoints/b
    python -m spider.curves OUT.png "default=checkpoints/a" "three loops=checkpoints/b"

Every chart shows one quantity over the bytes seen: the logged values as a thin line, their moving
average as a thick one, validation as dots; vertical lines are the beginnings of epochs. Only charts
with data are drawn. matplotlib is imported only to draw.
"""

import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from loguru import logger

from spider.common import UsageError, durable, one_line, run_program
from spider.machine import quiet
from spider.run import read_lines

POINTS = 300  # per curve, each a mean over equally many steps
SMOOTH = 1 / 40  # of a curve, to each side of a point in its moving average
EPOCHS = 30  # the beginnings of more are not marked
PANELS = 4  # at most, side by side

Runs = dict[str, list[dict]]  # lines of metrics.jsonl by label


class Chart(NamedTuple):
    title: str
    name: str  # key in metrics.jsonl
    factor: float = 1  # by which its values are multiplied
    validation: str = ""  # key of the validation values


LOSS = Chart("bits per byte", "loss", 1 / math.log(2), "val_bpb")
LOOPS = Chart("loops until halting", "mean_loops")
CHARTS = (
    LOSS,
    Chart("bytes per segment", "bytes_per_segment", validation="val_bytes_per_segment"),
    LOOPS,
    Chart("learning rate", "lr"),
    Chart("gradient norm", "grad_norm"),
    Chart("load of the busiest expert (1 is even)", "expert_balance"),
    Chart("bytes per second", "tok_per_sec"),
)
BY_SOURCE = "validation by source, bits per byte"
SOURCE = "val_bpb/"  # prefix of its keys

# --------------------------------------------------------------------------------------------------
# What is drawn


class Curve(NamedTuple):
    x: np.ndarray  # million bytes
    y: np.ndarray


def read_metrics(path: Path) -> list[dict]:
    """Read the finite numbers of each line of metrics.jsonl; return nothing if there is no such
    file."""
    return [finite(line) for line in read_lines(path) if line.get("bytes_seen")]


def finite(line: dict) -> dict:
    """Return a line without the numbers that were not finite."""
    return {name: value for name, value in line.items() if value is not None}


def curve_of(lines: list[dict], name: str, factor: float = 1) -> Curve:
    """Return the values of `name` over million bytes, at most POINTS, each the mean of equally many
    steps."""
    lines = [line for line in lines if name in line]
    size = max(1, math.ceil(len(lines) / POINTS))
    groups = [lines[first : first + size] for first in range(0, len(lines), size)]
    x = [group[-1]["bytes_seen"] / 1e6 for group in groups]
    y = [factor * np.mean([line[name] for line in group]) for group in groups]
    return Curve(np.array(x), np.array(y))


def smoothed(y: np.ndarray) -> np.ndarray:
    """Return the moving average of a curve. The window is shorter near the start, where a loss
    falls steeply."""
    longest = math.ceil(len(y) * SMOOTH)
    means = []
    for i in range(len(y)):
        reach = min(i, longest)
        means.append(y[i - reach : i + reach + 1].mean())
    return np.array(means)


def has_curve(chart: Chart, runs: Runs) -> bool:
    """Return whether any run has values for a chart; loops are drawn only if they vary."""
    curves = [curve_of(lines, chart.name).y for lines in runs.values()]
    logged = np.concatenate(curves)
    if chart is LOOPS:
        return len(logged) > 0 and np.ptp(logged) >= 0.005
    validated = any(chart.validation in line for lines in runs.values() for line in lines)
    return len(logged) > 0 or validated


def sources_of(lines: list[dict]) -> list[str]:
    """Return the keys of sources' validation in metrics.jsonl, in their order there."""
    names = dict.fromkeys(name for line in lines for name in line)  # an ordered set
    return [name for name in names if name.startswith(SOURCE)]


def beginnings(lines: list[dict]) -> list[float]:
    """Return after how many million bytes each epoch but the first begins; nothing for more than
    EPOCHS of them."""
    starts = []
    for before, line in zip(lines, lines[1:], strict=False):
        if line.get("epoch", 0) > before.get("epoch", 0):
            starts.append(before["bytes_seen"] / 1e6)
    return starts if len(starts) <= EPOCHS else []


def last_values(chart: Chart, lines: list[dict]) -> str:
    """Format the last values of a run's chart. Of the loss, add the lowest one of validation, if
    that is not the last."""
    logged = smoothed(curve_of(lines, chart.name, chart.factor).y)
    validation = curve_of(lines, chart.validation).y
    if not len(validation):
        return f"{logged[-1]:.4g}" if len(logged) else ""
    text = f"validation {validation[-1]:.4g}"
    if chart is LOSS and validation.min() < validation[-1]:
        text += f" (lowest {validation.min():.4g})"
    return f"training {logged[-1]:.4g}, {text}" if len(logged) else text


def limits_of(logged: np.ndarray, validation: np.ndarray) -> tuple[float, float]:
    """Return the limits of a vertical axis. They leave out the few largest of the logged values,
    since a loss starts high, but no validation."""
    shown = np.sort(logged)[: len(logged) - len(logged) // 25]
    values = np.concatenate((shown, validation))
    low = float(values.min())
    high = float(values.max())
    # do not zoom into the rounding of a constant; of zeros show -1 to 1
    room = max((high - low) * 0.06, abs(high) * 0.01) or 1.0
    return low - room, high + room


# --------------------------------------------------------------------------------------------------
# Drawing


def draw_curves(out: Path, runs: Runs):
    """Draw runs into a PNG, a color per run; raise ImportError without matplotlib."""
    of_notebook = "matplotlib_inline" in os.environ.get("MPLBACKEND", "")
    if of_notebook and importlib.util.find_spec("matplotlib_inline") is None:
        del os.environ["MPLBACKEND"]  # that of the notebook which started this process
    from matplotlib.figure import Figure

    charts = [chart for chart in CHARTS if has_curve(chart, runs)]
    has_sources = any(sources_of(lines) for lines in runs.values())
    panels = max(1, len(charts) + has_sources)
    columns = min(PANELS, math.ceil(panels / 2))
    rows = math.ceil(panels / columns)
    keys = 1 if len(runs) == 1 else len(runs) + 3  # rows of the legend
    size = (3.6 * columns, 3.1 * rows + 0.25 * keys)  # inches
    figure = Figure(figsize=size, layout="constrained")
    for number, chart in enumerate(charts, 1):
        draw_chart(figure.add_subplot(rows, columns, number), chart, runs)
    if has_sources:
        draw_sources(figure.add_subplot(rows, columns, panels), runs)
    for axes in figure.axes:
        axes.set_xlabel("million bytes")
        for number, lines in enumerate(runs.values()):
            for start in beginnings(lines):
                axes.axvline(start, color=f"C{number}", lw=0.8, ls=":", zorder=0)
    draw_legend(figure, runs)
    with durable(out, "wb") as file:
        figure.savefig(file, dpi=90, format="png")


def draw_chart(axes, chart: Chart, runs: Runs):
    """Draw the curves of all runs. Of a single run, the heading has the last values."""
    logged = []
    validation = []
    heading = chart.title
    for number, lines in enumerate(runs.values()):
        x, y = curve_of(lines, chart.name, chart.factor)
        color = f"C{number}"
        dots = curve_of(lines, chart.validation)
        axes.plot(x, y, color, lw=0.7, alpha=0.35)
        axes.plot(x, smoothed(y), color, lw=1.4, marker="o" if len(y) == 1 else "")
        axes.plot(*dots, color, marker="o", ms=4, ls="")
        logged.append(y)
        validation.append(dots.y)
        if len(runs) == 1:
            heading += f"\n{last_values(chart, lines)}"
    axes.set_ylim(*limits_of(np.concatenate(logged), np.concatenate(validation)))
    axes.set_title(heading, fontsize="medium")


def draw_sources(axes, runs: Runs):
    """Draw the validation of each source, a color per source and run."""
    for run, lines in runs.items():
        for name in sources_of(lines):
            x, y = curve_of(lines, name)
            label = f"{name.removeprefix(SOURCE)}: {y[-1]:.4g}"
            if len(runs) > 1:
                label = f"{run} {label}"
            axes.plot(x, y, lw=1.4, marker="o" if len(y) == 1 else "", label=plain(label))
    axes.legend(fontsize="small")
    axes.set_title(BY_SOURCE, fontsize="medium")


def draw_legend(figure, runs: Runs):
    """Draw the legend above all charts: of styles, and of several runs their colors and last
    losses."""
    from matplotlib.lines import Line2D

    keys = [
        Line2D([], [], color="0.4", label="training"),
        Line2D([], [], color="0.4", marker="o", ms=4, ls="", label="validation"),
    ]
    if any(map(beginnings, runs.values())):
        keys.append(Line2D([], [], color="0.4", lw=0.8, ls=":", label="an epoch begins"))
    if len(runs) > 1:
        for number, (run, lines) in enumerate(runs.items()):
            label = plain(f"{run}: {last_values(LOSS, lines)}")
            keys.append(Line2D([], [], color=f"C{number}", lw=3, label=label))
    columns = 1 if len(runs) > 1 else len(keys)
    figure.legend(handles=keys, loc="outside upper left", ncols=columns, frameon=False)


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
