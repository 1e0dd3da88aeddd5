"""Draw the curves of runs from their metrics.jsonl: `draw_curves`, `write_curves`; `charts_of` is
what they draw.

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

import numpy as np
from loguru import logger

from spider.common import UsageError, durable, one_line, run_program
from spider.machine import quiet
from spider.run import read_lines

POINTS = 300  # per curve, each a mean over equally many steps
SMOOTH = 1 / 40  # of a curve, to each side of a point in its moving average
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
BITS, LOOPS = CHARTS[0][0], CHARTS[2][0]
BY_SOURCE = "validation by source, bits per byte"
SOURCE = "val_bpb/"  # prefix of its keys
STYLES = dict(
    raw=dict(lw=0.7, alpha=0.35),
    line=dict(lw=1.4),
    dot=dict(marker="o", ms=4, ls=""),
    epoch=dict(lw=0.8, ls=":"),
)
GREY = "0.4"
PANELS = 4  # at most, side by side
PANEL = 3.6, 3.1  # inches
EPOCHS = 30  # the beginnings of more are not marked


def read_metrics(path: Path) -> list[dict]:
    """Read the finite numbers of each line of metrics.jsonl; return nothing if there is no such
    file."""
    return [
        {name: value for name, value in line.items() if value is not None}
        for line in read_lines(path)
        if line.get("bytes_seen")
    ]


Curve = tuple[str, str, Points]  # style, label, points


def charts_of(lines: list[dict]) -> dict[str, list[Curve]]:
    """Return the curves of a run by title of their chart; curves without points are left out, and
    charts without curves."""
    charts = {}
    for title, name, factor, val in CHARTS:
        raw = curve(lines, name, factor)
        charts[title] = [
            ("raw", "", raw),
            ("dot", "validation", curve(lines, val)),
            ("line", "training", smoothed(raw)),
        ]
    sources = dict.fromkeys(name for line in lines for name in line if name.startswith(SOURCE))
    charts[BY_SOURCE] = [
        ("line", one_line(name.removeprefix(SOURCE)), curve(lines, name)) for name in sources
    ]
    charts = {title: [entry for entry in curves if entry[2]] for title, curves in charts.items()}
    return {title: curves for title, curves in charts.items() if curves}


def panels(runs: list[dict[str, list[Curve]]]) -> list[str]:
    """Return the titles of the charts that are drawn: those that any run has, but loops only if
    they vary."""
    titles = [
        title
        for title in (*(title for title, *_ in CHARTS), BY_SOURCE)
        if any(title in run for run in runs)
    ]
    loops = [value for run in runs for _, _, points in run.get(LOOPS, ()) for _, value in points]
    if loops and max(loops) - min(loops) < 0.005:
        titles.remove(LOOPS)
    return titles


def beginnings(lines: list[dict]) -> list[float]:
    """Return after how many million bytes each epoch but the first begins; nothing for more than
    EPOCHS of them."""
    found = [
        before["bytes_seen"] / 1e6
        for before, line in zip(lines, lines[1:], strict=False)
        if line.get("epoch", 0) > before.get("epoch", 0)
    ]
    return found if len(found) <= EPOCHS else []


def final_numbers(title: str, curves: list[Curve]) -> str:
    """Format the last values of a run's chart; of a loss also the lowest one of validation, if that
    is not the last."""
    values = {label: [value for _, value in points] for _, label, points in curves if label}
    if [*values] == ["training"]:
        return f"{values['training'][-1]:.4g}"
    parts = [
        f"{label} {values[label][-1]:.4g}"
        for label in ("training", "validation")
        if label in values
    ]
    if (
        title == BITS
        and "validation" in values
        and min(values["validation"]) < values["validation"][-1]
    ):
        parts[-1] += f" (lowest {min(values['validation']):.4g})"
    return ", ".join(parts)


def curve(lines: list[dict], name: str | None, factor: float = 1) -> Points:
    """Return the values of `name` over million bytes, at most POINTS, each the mean of equally many
    steps."""
    found = [(line["bytes_seen"] / 1e6, line[name] * factor) for line in lines if name in line]
    size = max(1, math.ceil(len(found) / POINTS))
    parts = [found[i : i + size] for i in range(0, len(found), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def smoothed(points: Points) -> Points:
    """Return the moving average of a curve; the window is shorter near the start, where a loss
    falls steeply."""
    reach = [min(i, math.ceil(len(points) * SMOOTH)) for i in range(len(points))]
    parts = [[value for _, value in points[i - n : i + n + 1]] for i, n in enumerate(reach)]
    return [(x, sum(part) / len(part)) for (x, _), part in zip(points, parts, strict=True)]


def span(curves: list[Points]) -> tuple[float, float]:
    """Return the limits of a vertical axis. They leave out the few largest values, since a loss
    starts high."""
    values = sorted(value for points in curves for _, value in points)
    low, high = values[0], values[-1 - len(values) // 25]
    # do not zoom into the rounding of a constant
    room = max((high - low) * 0.06, abs(high) * 0.01) or 1.0
    return low - room, high + room


def draw_curves(out: Path, runs: dict[str, list[dict]]):
    """Draw lines of metrics.jsonl by label into a PNG, a color per run; raise ImportError without
    matplotlib."""
    from matplotlib.figure import Figure

    charts = {run: charts_of(lines) for run, lines in runs.items()}
    epochs = {run: beginnings(lines) for run, lines in runs.items()}
    titles = panels([*charts.values()])
    columns = max(1, min(PANELS, math.ceil(len(titles) / 2)))
    rows = max(1, math.ceil(len(titles) / columns))
    # inches above the panels, for the legends
    head = 0.75 if len(runs) == 1 else 0.55 + 0.25 * len(runs)
    width, height = PANEL[0] * columns, PANEL[1] * rows + head
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left=0.6 / width,
        right=1 - 0.15 / width,
        bottom=0.5 / height,
        top=1 - head / height,
        wspace=0.24,
        hspace=0.36,
    )  # automatic layouts double the time
    for number, title in enumerate(titles, 1):
        axes = figure.add_subplot(rows, columns, number, xlabel="million bytes")
        if title == BY_SOURCE:
            draw_sources(axes, charts)
        else:
            draw_chart(axes, title, charts)
        for color, starts in enumerate(epochs.values()):
            for start in starts:
                axes.axvline(
                    start,
                    color=GREY if len(runs) == 1 else f"C{color}",
                    zorder=0,
                    **STYLES["epoch"],
                )
    draw_legends(figure, charts, any(epochs.values()))
    with durable(out, "wb") as file:
        figure.savefig(file, dpi=90, format="png")


def draw_chart(axes, title: str, charts: dict[str, dict[str, list[Curve]]]):
    """Draw the curves of all runs that have a chart; of a single run its title has the last
    values."""
    drawn = []
    for color, found in enumerate(charts.values()):
        for style, _, points in found.get(title, ()):
            plot(axes, points, style, color)
            drawn.append(points)
    axes.set_ylim(*span(drawn))
    [*_, found] = charts.values()
    heading = f"{title}\n{final_numbers(title, found[title])}" if len(charts) == 1 else title
    axes.set_title(heading, fontsize="medium")


def draw_sources(axes, charts: dict[str, dict[str, list[Curve]]]):
    """Draw the validation of each source, a color per source and run, with a legend above the
    curves."""
    drawn = []
    for run, found in charts.items():
        for style, source, points in found.get(BY_SOURCE, ()):
            label = f"{source}: {points[-1][1]:.4g}"
            plot(axes, points, style, len(drawn), label if len(charts) == 1 else f"{run} {label}")
            drawn.append(points)
    low, high = span(drawn)
    axes.set_ylim(low, high + (high - low) * 0.09 * len(drawn))
    axes.legend(loc="upper right", fontsize="small")
    axes.set_title(BY_SOURCE, fontsize="medium")


def plot(axes, points: Points, style: str, color: int, label: str = ""):
    shape = STYLES[style] if len(points) > 1 else STYLES["dot"]  # a line of one point is invisible
    axes.plot(*np.transpose(points), color=f"C{color}", label=plain(label), **shape)


def draw_legends(figure, charts: dict[str, dict[str, list[Curve]]], has_epochs: bool):
    """Draw the legends above all charts: of styles, and of several runs their colors and last
    losses."""
    from matplotlib.lines import Line2D

    def key(label: str, color: str, **shape) -> Line2D:
        return Line2D([], [], color=color, label=label, **shape)

    styles = [key("training", GREY, **STYLES["line"]), key("validation", GREY, **STYLES["dot"])]
    if has_epochs:
        styles.append(key("an epoch begins", GREY, **STYLES["epoch"]))
    figure.legend(handles=styles, loc="upper left", ncols=len(styles), frameon=False)
    if len(charts) > 1:
        runs = [
            key(plain(f"{run}: {final_numbers(BITS, found.get(BITS, []))}"), f"C{color}", lw=3)
            for color, (run, found) in enumerate(charts.items())
        ]
        figure.legend(handles=runs, loc="upper right", frameon=False)


def plain(text: str) -> str:
    """Escape control characters, and the $ that matplotlib would interpret."""
    return one_line(text).strip().replace("$", r"\$")


def write_curves(directory: Path, signal: int | None):
    """Draw curves.png at a run's end, if matplotlib is installed; not after a signal, when time is
    for saving."""
    try:
        if signal is None and (lines := read_metrics(directory / "metrics.jsonl")):
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
        runs = {}
        for argument in argv[1:]:
            label, directory = labelled(argument)
            lines = read_metrics(directory / "metrics.jsonl")
            if not lines:
                raise UsageError(f"{directory}: there is no metrics.jsonl with steps in it")
            runs[argument if label in runs else label] = lines
        with quiet():  # warnings of characters that the font lacks
            draw_curves(Path(argv[0]), runs)

    return run_program(command, "curves.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
