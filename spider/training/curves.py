"""Draw the curves of metrics.jsonl."""

import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from loguru import logger

from spider import console, errors, files
from spider.training.machine import quiet
from spider.training.run_log import numbers_of
from spider.training.stopping import StopSignals


def leave_curves(directory: Path, stop: StopSignals):
    """At the end of a run that no signal ended, whose seconds are for saving: curves.png beside its metrics, where
    matplotlib is installed."""
    try:
        if stop.asked is None and (lines := read_metrics(directory / "metrics.jsonl")):
            with quiet():
                draw_curves(directory / "curves.png", {"training": lines})
            logger.info(f"curves: {directory / 'curves.png'}")
    except ModuleNotFoundError:
        pass
    except Exception as fault:            # of its installation, of a full disk: no fault of the run
        logger.warning(f"curves.png is not drawn: {fault}")


PANELS = (  # title, name in a line, factor, name of what validation says, its factor
    ("loss, nats per byte", "loss", 1, "val_loss", 1),
    ("bits per byte", "loss", 1 / math.log(2), "val_bpb", 1),
    ("bytes per segment", "bytes_per_segment", 1, "val_bytes_per_segment", 1),
    ("loops until halting", "mean_loops", 1, "", 1),
    ("learning rate", "lr", 1, "", 1),
    ("norm of the gradient", "grad_norm", 1, "", 1),
    ("balance: busiest expert, 1 is even", "expert_balance", 1, "", 1),
    ("bytes per second", "tok_per_sec", 1, "", 1),
)
POINTS = 300                              # of a curve, each a mean over as many steps as it takes
Points = list[tuple[float, float]]


def read_metrics(path: Path) -> list[dict]:
    """The numbers of each line of metrics.jsonl that is one of a step; nothing where there is no such file."""
    if not path.is_file():
        return []
    wanted, lines = {"step", "bytes_seen"}.union(*(panel[1::2] for panel in PANELS)), []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in iter(partial(file.readline, 1 << 16), ""):
            with suppress(ValueError):                            # cut off or altered
                lines.append({name: value for name, value in numbers_of(line).items()
                              if name in wanted and type(value) in (int, float) and abs(value) < 1e30})
    return lines


def axis_of(runs: Iterable[list[dict]]) -> tuple[str, float, str]:
    """What the curves of these runs lie over: name in a line, factor, name for people."""
    if all("bytes_seen" in line for lines in runs for line in lines):
        return "bytes_seen", 1e-6, "million bytes"
    return "step", 1, "steps"


def curve(lines: list[dict], axis: tuple[str, float, str], name: str, factor: float) -> Points:
    """Values of `name` over the axis, at most POINTS, means of equally many steps."""
    found = [(line[axis[0]] * axis[1], line[name] * factor) for line in lines if name in line]
    size = max(1, math.ceil(len(found) / POINTS))
    return [(part[-1][0], sum(value for _, value in part) / len(part))
            for part in (found[i:i + size] for i in range(0, len(found), size))]


def span(values: list[float]) -> tuple[float, float]:
    """Where a vertical axis begins and ends: without the few largest of many values, since a loss begins high."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1 - len(ordered) // 25]
    room = max((high - low) * 0.06, abs(high) * 0.01) or 1.0      # of a constant, not its rounding
    return low - room, high + room


def draw_curves(out: Path, runs: dict[str, list[dict]]):
    """Draws lines of metrics.jsonl by label into a PNG. ImportError without matplotlib."""
    from matplotlib.figure import Figure
    axis = axis_of(runs.values())
    figure = Figure(figsize=(14, 6.4))
    figure.subplots_adjust(0.04, 0.08, 0.99, 0.94, wspace=0.2, hspace=0.34)  # its own layouts take as long again
    for axes, (title, name, factor, val, val_factor) in zip(figure.subplots(2, 4).flat, PANELS):
        values = []
        for number, lines in enumerate(runs.values()):
            line, dots = curve(lines, axis, name, factor), curve(lines, axis, val, val_factor)
            axes.plot(*zip(*line or [((), ())]), lw=1.2, color=f"C{number}", label=f"run {number}")
            axes.plot(*zip(*dots or [((), ())]), "o", ms=4, color=f"C{number}", mec="black", mew=0.6,
                      label=None if number else "validation")
            values += [value for _, value in line + dots]
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        if values:
            axes.set_ylim(*span(values))
    for axes in figure.axes[4:]:
        axes.set_xlabel(axis[2])
    labels = {f"run {number}": console.one_line(label) for number, label in enumerate(runs)}
    for text in figure.axes[0].legend(fontsize=9).get_texts():    # before, $ and a leading _ would have meant something
        text.set(text=labels.get(text.get_text(), text.get_text()), parse_math=False)
    with files.durable(out, "wb") as file:
        figure.savefig(file, dpi=90, format="png")


# ---------------------------------------------------------------------------------------------------------------------

def main(argv: list[str]) -> int:
    """Draws the curves of runs in one picture. Exit status: 0; 2 with one line on stderr."""
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    out, *runs = argv or [""]
    places = {label: directory for label, _, directory in (run.partition("=") for run in runs)}
    if not out or not runs or not all(map(all, places.items())) or len(places) < len(runs):
        print("look.py: error: python look.py OUT.png LABEL=DIR ..., each LABEL once, each DIR with a metrics.jsonl",
              file=sys.stderr)
        return 2
    try:
        found = {label: read_metrics(Path(directory) / "metrics.jsonl") for label, directory in places.items()}
        if missing := [label for label, lines in found.items() if not lines]:
            raise errors.DataError(f"{', '.join(missing)}: there are no lines in metrics.jsonl")
        with quiet():                     # of signs that the font lacks
            draw_curves(Path(out), found)
    except ImportError as fault:
        fault = f"{fault}: pip install -e \".[bench]\""
        print(f"look.py: error: {console.one_line(fault)}", file=sys.stderr)
        return 2
    except (errors.DataError, OSError) as fault:
        print(f"look.py: error: {console.one_line(fault)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
