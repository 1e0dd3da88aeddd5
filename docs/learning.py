"""Draws the figures of learning.md from the runs of learning.jsonl, one line a run: python docs/learning.py

A run has what distinguishes it (figure, arm, seed, and what is on its axes), its validation loss in nats per byte, its
CPU seconds, its flags and its commit.
"""

import json
import math
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RUNS = [json.loads(line) for line in (HERE / "learning.jsonl").read_text().splitlines()]


def lines(figure: str, x: str) -> dict[str, list[tuple[float, float]]]:
    """Points of a figure's runs by arm: (x, loss), means over seeds."""
    found: dict[str, dict[float, list[float]]] = {}
    for run in RUNS:
        if run["figure"] == figure:
            found.setdefault(run["arm"], {}).setdefault(run[x], []).append(run["loss"])
    return {name: sorted((at, sum(losses) / len(losses)) for at, losses in points.items())
            for name, points in found.items()}


def draw(axes, figure: str, x: str, title: str, xlabel: str, above_best: bool = False):
    found = lines(figure, x)
    for name, points in found.items():
        best = min(loss for _, loss in points) if above_best else 0
        axes.plot([at for at, _ in points], [loss - best for _, loss in points], marker="o", label=name)
    axes.set(title=title, xlabel=xlabel,
             ylabel="nats per byte above the line's best" if above_best else "validation loss, nats per byte")
    axes.set_xscale("log", base=2)
    ticks = sorted({at for points in found.values() for at, _ in points})
    if len(ticks) > 6:
        ticks = [ticks[0] * 2 ** i for i in range(math.ceil(math.log2(ticks[-1] / ticks[0])) + 1)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45 if len(ticks) > 5 else 0)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_worth(axes):
    """What is added to the byte layers, by how many bytes were read: the loss without it less the loss with it."""
    runs = [run for run in RUNS if "bytes" in run]                # MB
    alike = lambda run: (run["bytes"], run["seed"], run.get("processor", "").rpartition(" ")[2])  # the last: precision
    plain = {alike(run): run["loss"] for run in runs if run["arm"].endswith("no core")}
    worth: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        if not run["arm"].endswith("no core"):
            gap = plain[alike(run)] - run["loss"]
            worth.setdefault(run["arm"], {}).setdefault(run["bytes"], []).append(gap)
    for name, gaps in worth.items():
        line, = axes.plot(*zip(*sorted((at, sum(gap) / len(gap)) for at, gap in gaps.items())), marker="o", label=name)
        axes.plot(*zip(*((at, one) for at, gap in gaps.items() for one in gap)), ".", color=line.get_color(), alpha=0.4)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(title="Python: what is gained over no core, same bytes", xlabel="MB of text, each byte read once",
             ylabel="nats per byte (small: one seed)", xscale="log")
    ticks = sorted({run["bytes"] for run in runs})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def main():
    figure, (left, right, last) = plt.subplots(1, 3, figsize=(16, 4.2), layout="constrained")
    draw_worth(last)
    draw(left, "sequence", "seq_len", "2.5 MB of Python, by what a sequence holds", "bytes per sequence")
    draw(right, "rates", "lr", "peak rate: its best falls with steps and width", "peak rate of the matrices (--lr)",
         above_best=True)
    figure.savefig(HERE / "learning.png", dpi=100)


if __name__ == "__main__":
    main()
