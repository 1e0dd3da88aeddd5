"""Draw the curves of runs from their metrics.jsonl: `draw_curves`, `write_curves`; `charts_of` is what they draw.

    python -m spider.curves OUT.png "default=checkpoints" "three loops=checkpoints-3"

Every chart shows one quantity over the bytes seen: the logged values as a thin line, their moving average as a thick
one, validation as dots. matplotlib is imported only to draw.
"""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
from loguru import logger

from spider.common import UsageError, durable, one_line, run_program
from spider.machine import quiet
from spider.run import read_lines

POINTS = 300                              # per curve, each a mean over equally many steps
SMOOTH = 1 / 40                           # of a curve, to each side of a point in its moving average
Points = list[tuple[float, float]]

# Title, key in metrics.jsonl, factor, key of the validation values
CHARTS = (
    ("bits per byte", "loss", 1 / math.log(2), "val_bpb"),
    ("bytes per segment", "bytes_per_segment", 1, "val_bytes_per_segment"),
    ("loops until halting", "mean_loops", 1, None),
    ("learning rate", "lr", 1, None),
    ("gradient norm", "grad_norm", 1, None),
    ("load of the busiest expert (1 is even)", "expert_balance", 1, None),
    ("bytes per second", "tok_per_sec", 1, None),
)
BY_SOURCE = "validation by source, bits per byte"
SOURCE = "val_bpb/"                       # prefix of its keys
STYLES = dict(raw=dict(lw=0.7, alpha=0.35), line=dict(lw=1.4), dot=dict(marker="o", ms=4, ls=""))


def read_metrics(path: Path) -> list[dict]:
    """Read the finite numbers of each line of metrics.jsonl; return nothing if there is no such file."""
    return [{name: value for name, value in line.items() if value is not None}
            for line in read_lines(path) if line.get("bytes_seen")]


def charts_of(lines: list[dict]) -> dict[str, list[tuple[str, str, Points]]]:
    """Return the curves of a run by title of their chart: style, label, points. Those without points are left out."""
    charts = {}
    for title, name, factor, val in CHARTS:
        raw = curve(lines, name, factor)
        charts[title] = [("raw", "", raw), ("dot", "validation", curve(lines, val)),
                         ("line", "training", smoothed(raw))]
    sources = dict.fromkeys(name for line in lines for name in line if name.startswith(SOURCE))
    charts[BY_SOURCE] = [("line", one_line(name.removeprefix(SOURCE)), curve(lines, name)) for name in sources]
    return {title: [entry for entry in curves if entry[2]] for title, curves in charts.items()}


def curve(lines: list[dict], name: str | None, factor: float = 1) -> Points:
    """Return the values of `name` over million bytes, at most POINTS, each the mean of equally many steps."""
    found = [(line["bytes_seen"] / 1e6, line[name] * factor) for line in lines if name in line]
    size = max(1, math.ceil(len(found) / POINTS))
    parts = [found[i:i + size] for i in range(0, len(found), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def smoothed(points: Points) -> Points:
    """Return the moving average of a curve; the window is shorter near the start, where a loss falls steeply."""
    reach = [min(i, math.ceil(len(points) * SMOOTH)) for i in range(len(points))]
    parts = [[value for _, value in points[i - n:i + n + 1]] for i, n in enumerate(reach)]
    return [(x, sum(part) / len(part)) for (x, _), part in zip(points, parts)]


def span(curves: list[Points]) -> tuple[float, float]:
    """Return the limits of a vertical axis. They leave out the few largest values, since a loss starts high."""
    values = sorted(value for points in curves for _, value in points)
    low, high = values[0], values[-1 - len(values) // 25]
    room = max((high - low) * 0.06, abs(high) * 0.01) or 1.0      # do not zoom into the rounding of a constant
    return low - room, high + room


def draw_curves(out: Path, runs: dict[str, list[dict]]):
    """Draw lines of metrics.jsonl by label into a PNG, a color per run; raise ImportError without matplotlib."""
    from matplotlib.figure import Figure
    figure, runs = Figure(figsize=(14, 6.4)), {run: charts_of(lines) for run, lines in runs.items()}
    figure.subplots_adjust(0.04, 0.08, 0.99, 0.94, wspace=0.2, hspace=0.34)  # automatic layouts double the time
    for axes, title in zip(figure.subplots(2, 4).flat, [*(title for title, *_ in CHARTS), BY_SOURCE]):
        for number, (run, charts) in enumerate(runs.items()):
            for i, (style, label, points) in enumerate(charts[title]):
                color = number + i if title == BY_SOURCE else number
                name = one_line(f"{run} {label}").replace("$", r"\$")  # which matplotlib would interpret
                axes.plot(*np.transpose(points), color=f"C{color}", label=label and name, **STYLES[style])
        if curves := [points for charts in runs.values() for _, _, points in charts[title]]:
            axes.set_ylim(*span(curves))
        axes.set(title=title, xlabel="million bytes")
        if title in (CHARTS[0][0], BY_SOURCE):
            axes.legend()
    with durable(out, "wb") as file:
        figure.savefig(file, dpi=90, format="png")


def write_curves(directory: Path, signal: int | None):
    """Draw curves.png at a run's end, if matplotlib is installed; not after a signal, when time is for saving."""
    try:
        if signal is None and (lines := read_metrics(directory / "metrics.jsonl")):
            with quiet():
                draw_curves(directory / "curves.png", {"": lines})
            logger.info(f"curves: {directory / 'curves.png'}")
    except ModuleNotFoundError:
        pass
    except Exception as fault:            # broken installation or full disk, which must not fail the run
        logger.warning(f"could not draw curves.png: {fault}")


def main(argv: list[str]) -> int:
    """Draw the curves of several runs in one picture. Exit status: 0, or 2 with one line on stderr."""
    def command():
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError('matplotlib is not installed: pip install -e ".[plot]"')
        runs = {label: read_metrics(Path(directory) / "metrics.jsonl")
                for label, _, directory in (run.partition("=") for run in argv[1:])}
        if not runs or not all(runs.values()):
            raise UsageError("usage: python -m spider.curves OUT.png LABEL=DIR ..., with a metrics.jsonl in each DIR")
        with quiet():                     # warnings of characters that the font lacks
            draw_curves(Path(argv[0]), runs)
    return run_program(command, "curves.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
