"""Plot the losses of runs over the bytes that they read: python docs/curves.py OUT.png BYTES_A_STEP LABEL=DIR ...

The line is the training loss, a mean over 25 steps; the dots are validation. Needs matplotlib (pip install -e ".[bench]").
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def main(out: str, bytes_a_step: str, *runs: str):
    axes = (figure := Figure(figsize=(7, 4.2), layout="constrained")).add_subplot()
    for run in runs:
        label, _, directory = run.partition("=")
        lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
        groups = [lines[i:i + 25] for i in range(0, len(lines), 25)]
        means = [sum(line["loss"] for line in group) / len(group) for group in groups]
        curve, = axes.plot([group[-1]["step"] * int(bytes_a_step) / 1e6 for group in groups], means, label=label, lw=1)
        dots = [(line["step"] * int(bytes_a_step) / 1e6, line["val_loss"]) for line in lines if "val_loss" in line]
        axes.plot(*zip(*dots), "o", color=curve.get_color(), ms=4)
    axes.set(xlabel="training bytes, millions", ylabel="nats per byte", ylim=(1.0, 2.2))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
