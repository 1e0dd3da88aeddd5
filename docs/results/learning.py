"""Draw the figures of learning.md from the runs of learning.jsonl, one line a run: python docs/results/learning.py

A run has what distinguishes it (figure, arm, seed, and what is on its axes), its validation loss in nats per byte, its
CPU seconds, its flags and its commit. Lines of the figure "time of a step" have CPU time relative to no core's instead,
those of "evaluation windows" bits per byte, and those of "note" a text.
"""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from train import RECIPES, measured_rate

RUNS = [json.loads(line) for line in (HERE / "learning.jsonl").read_text().splitlines()]


def arms(figure: str, **same) -> dict[str, list[dict]]:
    """Return the runs of a figure by arm."""
    found: dict[str, list[dict]] = {}
    for run in RUNS:
        if run["figure"] == figure and all(run[key] == value for key, value in same.items()):
            found.setdefault(run["arm"], []).append(run)
    return found


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def means(runs: list[dict], x) -> list[tuple[float, float]]:
    """Return (x, mean loss over seeds) of an arm's runs."""
    return [(at, mean(run["loss"] for run in runs if x(run) == at)) for at in sorted({x(run) for run in runs})]


def finish(axes, title: str, xlabel: str, ylabel: str, ticks=()):
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if len(ticks):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)


def draw_bytes(axes):
    """Draw what the recipe reaches, by how much there is to read, beside a compressor."""
    found = arms("bytes") | arms("others")
    for name in ("no core", "core", "PPMd, order 16"):
        axes.plot(*zip(*means(found[name], lambda run: run["bytes"])), marker="o", label=name)
    finish(axes, "Python: each byte read once", "MB of text", "validation loss, nats per byte", (2.5, 5, 10, 27.7))


def draw_sequence(axes):
    for name, runs in arms("sequence").items():
        axes.plot(*zip(*means(runs, lambda run: run["seq_len"])), marker="o", label=name)
    finish(axes, "2.5 MB of Python, by what a sequence holds", "bytes per sequence", "validation loss, nats per byte",
           (1024, 2048, 4096, 8192))


def of_the_rule(run: dict) -> float:
    """Return a run's rate as a multiple of what the rule gives for its steps and width."""
    def flag(name, default):
        found = re.search(rf"{name}[ =](\d+)", run["flags"])
        return int(found[1]) if found else default
    recipe = RECIPES["tiny"]
    steps = flag("--target_tokens", recipe["target_tokens"]) / 4096 / flag("--micro_batch", recipe["micro_batch"])
    return run["lr"] / measured_rate(SimpleNamespace(hidden_size=flag("hidden_size", 128)), steps)


def draw_rates(axes):
    """Draw losses over rates: the best rate stands still where the rule is right."""
    for name, runs in arms("rates").items():
        points = means(runs, of_the_rule)
        best = min(loss for _, loss in points)
        if len(points) > 1:
            axes.plot([at for at, _ in points], [loss - best for _, loss in points], marker="o", label=name)
    axes.axvline(1, color="black", linewidth=0.8)
    finish(axes, "peak rate: where the best stands", "--lr as a multiple of the rule's",
           "nats per byte above the line's best", (0.25, 0.5, 0.7, 1, 1.4, 2))
    axes.legend(frameon=False, fontsize=8, loc="center right")
    axes.set(xlim=(0.2, 16), ylim=(-0.001, 0.02))  # the legend has the right


def draw_time(axes, figure: str, title: str):
    """Draw the loss by what a step takes: seeds small, their mean large."""
    times = {name: mean(run["times"] for run in runs) for name, runs in arms("time of a step").items()}
    found = arms(figure, **({"bytes": 10} if figure == "bytes" else {}))
    for name, runs in ((name, found[name]) for name in times if name in found):
        point, = axes.plot(times[name], mean(run["loss"] for run in runs), "o", label=name)
        axes.plot([times[name]] * len(runs), [run["loss"] for run in runs], ".", color=point.get_color(), alpha=0.4)
    finish(axes, title, "CPU time of a step over no core's (bf16, AMX)", "validation loss, nats per byte")


def draw_worth(axes):
    """Draw what is added to the byte layers, by how many bytes were read: the loss without it less the loss with it."""
    alike = lambda run: (run["bytes"], run["seed"], run["processor"].rpartition(" ")[2])     # the last: precision
    plain = {alike(run): run["loss"] for run in RUNS if "bytes" in run and "processor" in run
             and run["arm"].endswith("no core")}
    for figure, when in (("bytes", ""), ("bytes, before the match memory had words", " (before)")):
        for name, runs in arms(figure).items():
            gaps = [dict(bytes=run["bytes"], loss=plain[alike(run)] - run["loss"]) for run in runs
                    if alike(run) in plain and name != "no core"]
            if gaps:
                line, = axes.plot(*zip(*means(gaps, lambda gap: gap["bytes"])), marker="o", label=name + when)
                axes.plot([gap["bytes"] for gap in gaps], [gap["loss"] for gap in gaps], ".", color=line.get_color(),
                          alpha=0.4)
    axes.axhline(0, color="black", linewidth=0.8)
    finish(axes, "Python: gained over no core at equal bytes", "MB of text; before: the match memory had no words",
           "nats per byte (small: one seed)", (5, 10, 12))
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_ylim(-0.006)


def draw_passes(axes, text: str, arms_shown: tuple[str, ...]):
    """Draw the validation loss at the end of each of twelve passes over little text, seed 0."""
    found = arms(f"read again, {text}", seed=0)
    for name in arms_shown:
        losses = [loss for _, loss in found[name][0]["by_step"]][:12]
        axes.plot(range(1, len(losses) + 1), losses, marker="o", label=name)
    finish(axes, f"tinyshakespeare, {text}, read twelve times", "passes", "validation loss, nats per byte")


def save(name: str, *panels):
    figure, axes = plt.subplots(1, len(panels), figsize=(16 / 3 * len(panels), 4.2), layout="constrained")
    for panel, one in zip(panels, axes):
        panel(one)
    figure.savefig(HERE / name, dpi=100)


def main():
    save("learning.png", draw_bytes, draw_sequence, draw_rates)
    save("learning-core.png",
         lambda axes: draw_time(axes, "core, tinyshakespeare", "tinyshakespeare, one pass (1 MB)"),
         lambda axes: draw_time(axes, "bytes", "Python, 10 MB, each byte read once"), draw_worth)
    save("learning-passes.png",
         lambda axes: draw_passes(axes, "250 kB", ("no dropout", "no core", "0.4 in every pass",
                                                   "growing to 0.5 (the recipe)")),
         lambda axes: draw_passes(axes, "1 MB", ("no core", "0.5 from the second pass on, 0.1 of bytes",
                                                 "growing to 0.5 (the recipe)")))


if __name__ == "__main__":
    main()
