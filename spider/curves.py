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

EPOCHS = 30  # the beginnings of more are not marked
COLUMNS = 4  # charts in a row, at most


class Chart(NamedTuple):
    title: str
    name: str  # key in metrics.jsonl
    factor: float = 1  # by which its values are multiplied
    validation: str = ""  # key of the validation values


CHARTS = (
    Chart("bits per byte", "loss", 1 / math.log(2), "val_bpb"),
    Chart("bytes per segment", "bytes_per_segment", validation="val_bytes_per_segment"),
    Chart("loops until halting", "mean_loops"),
    Chart("learning rate", "lr"),
    Chart("gradient norm", "grad_norm"),
    Chart("load of the busiest expert (1 is even)", "expert_balance"),
    Chart("bytes per second", "tok_per_sec"),
)
SOURCE = "val_bpb/"  # prefix of the keys of a source's validation

# --------------------------------------------------------------------------------------------------
# What is drawn


def read_metrics(path: Path) -> list[dict]:
    """Read the finite numbers of each line of metrics.jsonl; return nothing if there is no such
    file."""
    lines = [line for line in read_lines(path) if line.get("bytes_seen")]
    return [{key: value for key, value in line.items() if value is not None} for line in lines]


def curve_of(lines: list[dict], name: str, factor: float = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve: million bytes, and over them the values of `name`."""
    lines = [line for line in lines if name in line]
    x = [line["bytes_seen"] / 1e6 for line in lines]
    y = [factor * line[name] for line in lines]
    return np.array(x), np.array(y)


def average(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the moving average of a curve, each mean over the middle of a twentieth of it."""
    if not len(y):
        return x, y
    width = 1 + len(y) // 20
    means = np.convolve(y, np.full(width, 1 / width), "valid")
    return x[width // 2 :][: len(means)], means


def charts_of(lines: list[dict]) -> list[Chart]:
    """Return the charts for which lines have values, one for each source of a mixture, too."""
    names = dict.fromkeys(name for line in lines for name in line)  # in their order there
    charts = [chart for chart in CHARTS if {chart.name, chart.validation} & names.keys()]
    for name in names:
        if name.startswith(SOURCE):
            source = name.removeprefix(SOURCE)
            charts.append(Chart(f"validation of {source}, bits per byte", name))
    return charts


def beginnings(lines: list[dict]) -> list[float]:
    """Return after how many million bytes each epoch but the first begins; nothing for more than
    EPOCHS of them."""
    starts = []
    for before, line in zip(lines, lines[1:], strict=False):
        if line.get("epoch", 0) > before.get("epoch", 0):
            starts.append(before["bytes_seen"] / 1e6)
    return starts if len(starts) <= EPOCHS else []


# --------------------------------------------------------------------------------------------------
# Drawing


def draw_curves(out: Path, runs: list[tuple[str, list[dict]]]):
    """Draw runs into a PNG, a color per run; raise ImportError without matplotlib.

    runs: labels, and the lines of metrics.jsonl."""
    if importlib.util.find_spec("matplotlib_inline") is None:
        os.environ.pop("MPLBACKEND", None)  # that of the notebook which started this process
    from matplotlib.figure import Figure

    charts = charts_of([line for _, lines in runs for line in lines])
    columns = max(1, min(COLUMNS, len(charts)))
    rows = max(1, math.ceil(len(charts) / columns))
    figure = Figure(figsize=(3.6 * columns, 3.3 * rows), layout="constrained")
    for number, chart in enumerate(charts, 1):
        draw_chart(figure.add_subplot(rows, columns, number), chart, runs)
    with durable(out, "wb") as file:
        figure.savefig(file, dpi=90, format="png")


def draw_chart(axes, chart: Chart, runs: list[tuple[str, list[dict]]]):
    """Draw the curves of all runs; the legend has their last values."""
    for number, (label, lines) in enumerate(runs):
        x, y = average(*curve_of(lines, chart.name, chart.factor))
        dots_x, dots_y = curve_of(lines, chart.validation)
        last = [f"{y[-1]:.4g}"] if len(y) else []
        if len(dots_y):
            last.append(f"validation {dots_y[-1]:.4g}, lowest {dots_y.min():.4g}")
        color = f"C{number}"
        axes.plot(x, y, color, lw=1.4, marker="o" if len(y) == 1 else "")
        axes.plot(dots_x, dots_y, color, marker="o", ms=4, ls="")
        axes.plot([], [], color, label=plain(f"{label} {', '.join(last)}"))
    axes.set_ylim(axes.get_ylim())  # a loss starts so high that the rest would look flat
    for number, (_, lines) in enumerate(runs):
        x, y = curve_of(lines, chart.name, chart.factor)
        axes.plot(x, y, f"C{number}", lw=0.7, alpha=0.35)
        for start in beginnings(lines):
            axes.axvline(start, color=f"C{number}", lw=0.8, ls=":", zorder=0)
    axes.set_title(plain(chart.title), fontsize="medium")
    axes.set_xlabel("million bytes")
    axes.legend(fontsize="small")


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
                draw_curves(directory / "curves.png", [("", lines)])
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
        runs = []
        for argument in arguments:
            label, directory = labelled(argument)
            lines = read_metrics(directory / "metrics.jsonl")
            if not lines:
                raise UsageError(f"{directory}: there is no metrics.jsonl with steps in it")
            runs.append((label, lines))
        with quiet():  # warnings of characters that the font lacks
            draw_curves(Path(out), runs)

    return run_program(command, "curves.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
