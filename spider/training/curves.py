"""Draw the curves of runs from their metrics.jsonl.

    python -m spider.training.curves OUT.png checkpoints/a checkpoints/b
    python -m spider.training.curves OUT.png "default=checkpoints/a" "three loops=checkpoints/b"

Each panel shows one quantity over the bytes seen, in one color per run: a moving average, and
circles for validation. The first tenth of a run does not affect the range of the y axis, since the
first losses would flatten the rest. matplotlib is imported only for drawing.
"""

import importlib.util
import math
import os
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
from loguru import logger

from spider.errors import UsageError, run_command
from spider.files import atomic_write
from spider.machine import quiet
from spider.training.run import read_metrics

PANELS = {  # title: key in metrics.jsonl, key of the same quantity in validation
    "bits per byte": ("bpb", "val_bpb"),
    "bytes per segment": ("bytes_per_segment", "val_bytes_per_segment"),
    "loops until halting": ("mean_loops", ""),
    "learning rate": ("lr", ""),
    "gradient norm": ("grad_norm", ""),
    "load of the busiest expert (1 is even)": ("expert_balance", ""),
    "bytes per second": ("tok_per_sec", ""),
}
SOURCE_PREFIX = "val_bpb/"  # followed by the name of a source
COLUMNS = 3  # panels per row

Curves = dict[str, np.ndarray]  # by key, [2, values]: bytes seen, values


def read_curves(directory: Path) -> Curves:
    """Read the finite numbers of a run's metrics.jsonl; return {} if there is no such file."""
    points = defaultdict(list)
    for line in read_metrics(directory / "metrics.jsonl"):
        bytes_seen = line.get("bytes_seen")
        loss = line.get("loss")
        if loss is not None:
            line["bpb"] = loss / math.log(2)
        for key, value in line.items():
            if bytes_seen and value is not None:
                points[key].append((bytes_seen, value))
    return {key: np.array(values).T for key, values in points.items()}


def without_first_tenth(values: np.ndarray) -> np.ndarray:
    """Drop the first tenth of the values."""
    return values[len(values) // 10 :]


def smooth(curve: np.ndarray) -> np.ndarray:
    """Average a curve [2, values] over a moving window of a twentieth of its values."""
    width = 1 + curve.shape[1] // 20
    sums = np.pad(curve.cumsum(axis=1), ((0, 0), (1, 0)))
    return (sums[:, width:] - sums[:, :-width]) / width


def panels_of(runs: list[Curves]) -> dict[str, tuple[str, str]]:
    """Return the panels for the quantities that these runs have, one of them for each source of a
    mixture."""
    found = set().union(*runs)
    panels = {title: keys for title, keys in PANELS.items() if found & {*keys}}
    for key in sorted(found):
        if key.startswith(SOURCE_PREFIX):
            panels[f"validation of {key.removeprefix(SOURCE_PREFIX)}, bits per byte"] = ("", key)
    return panels


def draw_curves(out: Path, labels: list[str], runs: list[Curves]):
    """Draw the curves of runs into a PNG file. Raise ImportError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib_inline") is None:
        os.environ.pop("MPLBACKEND", None)  # set by the notebook that started this process
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    panels = panels_of(runs)
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure((4.5 * COLUMNS, 1 + 3.2 * rows), layout="constrained")
    figure.supxlabel("bytes seen", fontsize="medium")
    for number, (title, (key, validation)) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, COLUMNS, number, title=title)
        shown = []  # values that determine the range of the y axis
        for color, (label, curves) in enumerate(zip(labels, runs, strict=True)):
            if key in curves:
                x, y = smooth(curves[key])
                axes.plot(x, y, f"C{color}", label=f"{y[-1]:.4g} {label}")
                shown.append(without_first_tenth(y))
            if validation in curves:
                x, y = curves[validation]
                described = f"{y[-1]:.4g} {label}, validation, lowest {y.min():.4g}"
                axes.plot(x, y, f"C{color}o-", lw=0.7, mfc="white", label=described)
                shown.append(without_first_tenth(y))
        values = np.concatenate(shown)
        margin = 0.05 * np.ptp(values)
        axes.set_ylim(values.min() - margin, values.max() + margin)
        axes.ticklabel_format(useOffset=False)
        axes.xaxis.set_major_formatter(EngFormatter("B"))
        axes.locator_params(axis="x", nbins=6)
        axes.legend(fontsize="small")
    with atomic_write(out, "wb") as file:
        figure.savefig(file, dpi=90, format="png")


REDRAW_SECONDS = 60.0  # between two drawings of a run; each drawing takes a second or more


def write_curves(directory: Path, ends: bool):
    """Draw curves.png of a run, if matplotlib is installed. ends: the run ends, so log the path."""
    out = directory / "curves.png"
    try:
        curves = read_curves(directory)
        if curves:
            with quiet():
                draw_curves(out, [directory.absolute().name], [curves])
            if ends:
                logger.info(f"curves: {out}")
    except ModuleNotFoundError:
        pass
    except Exception as fault:  # a broken installation or a full disk must not end the run
        logger.warning(f"could not draw curves.png: {fault}")


def main(argv: list[str]) -> int:
    """Draw the curves of several runs into one PNG file."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('matplotlib is not installed: pip install -e ".[plot]"')
    if len(argv) < 2:
        raise UsageError("usage: python -m spider.training.curves OUT.png [LABEL=]DIR ...")
    out, *arguments = argv
    labels = []
    runs = []
    for argument in arguments:
        label, equals, directory = argument.partition("=")
        if not equals or os.path.isdir(argument):
            directory = argument
            label = Path(argument).absolute().name
        curves = read_curves(Path(directory))
        if not curves:
            raise UsageError(f"{directory}: there is no metrics.jsonl with steps in it")
        labels.append(label)
        runs.append(curves)
    with quiet():  # matplotlib warns about characters that the font lacks
        draw_curves(Path(out), labels, runs)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(partial(main, sys.argv[1:]), "curves.py"))
