"""Measure each mechanism on a task made for it, against what was published of it.

    python docs/results/mechanisms.py looping --seed 0 [--arm "1 x 4"] >> docs/results/mechanisms.jsonl
    python docs/results/mechanisms.py plot              # draws docs/results/mechanisms-NAME.png of that file

A NAME is one of looping, injection, halting, engram, segments. Each arm trains the real model, small, for less than a
minute of one CPU core; a line of JSON has its accuracy by the depth of the case. mechanisms.md beside this program
says what was expected and found. The plots need matplotlib (pip install -e ".[bench]").
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parents[1]))

import spider_model
import train
from spider.model import packing
from spider.model.config import SpiderConfig
from spider.training.batches import Batch
from spider.training.machine import keep_freed_memory
from spider.training.optimizers import Optimizers
from spider.version import commit
from spider_model import Spider

# One dense layer of the core and nothing beside it: what an arm adds is what it measures.
BARE = dict(hidden_size=64, n_prelude_layers=0, n_recurrent_layers=1, n_coda_layers=0, n_loops=1, n_heads=2,
            q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32,
            intermediate_size=128, n_routed_experts=0, moe_intermediate_size=128, boundaries="every_third", lora_rank=0,
            act=False, engram_layers=(), engram_byte_orders=(), engram_match_orders=())

Task = Callable[[torch.Generator, int], tuple[Tensor, Tensor, Tensor]]
"""(generator, rows) -> ids, labels and the depth of each case, [rows, T] each; labels are -100 where there is none."""


# ---------------------------------------------------------------------------------------------------------------------
# Tasks

def chains(generator: torch.Generator, rows: int, statements: int = 24, n_chains: int = 4, values: int = 4):
    """Assignments of three bytes, `A=2` or `Ba.`: the variable B takes a's value. To say B's value, as the label of the
    last byte asks, is as many hops as its depth; chains are interleaved at random, so that no count tells the root."""
    row = torch.arange(rows)
    names = torch.rand(rows, statements, generator=generator).argsort(1) + 192
    chain = torch.randint(n_chains, (rows, statements), generator=generator)
    chain[:, :n_chains] = torch.rand(rows, n_chains, generator=generator).argsort(1)
    value = torch.randint(values, (rows, n_chains), generator=generator) + ord("0")
    last, hops = torch.full((rows, n_chains), ord("=")), torch.full((rows, n_chains), -1)
    ids, labels, depth = (torch.full((rows, statements, 3), fill) for fill in (ord("."), -100, -1))
    for i in range(statements):
        c = chain[:, i]
        hops[row, c] += 1
        ids[:, i, 0], ids[:, i, 1] = names[:, i], last[row, c]
        ids[:, i, 2] = torch.where(hops[row, c] == 0, value[row, c], ord("."))
        labels[:, i, 2], depth[:, i, 2] = value[row, c], hops[row, c]
        last[row, c] = names[:, i] - 64   # as it is read, so that a mean of bytes tells it from what it names
    return ids.flatten(1), labels.flatten(1), depth.flatten(1)


class Dictionary:
    """Planted n-grams: 12 random letters, the last n of them a key, whose value the last byte's label asks for. Eight
    keys share each suffix of n - 1 letters, so that lower orders do not tell. The depth of a case is n."""

    def __init__(self, orders: tuple[int, ...], suffixes: int, values: int = 16):
        generator = torch.Generator().manual_seed(12)                                        # the same for every seed
        self.orders, self.suffixes = orders, suffixes
        self.letters = [torch.randint(64, 128, (suffixes, order - 1), generator=generator) for order in orders]
        self.first = torch.stack([64 + torch.randperm(64, generator=generator)[:8] for _ in orders])
        self.value = torch.randint(64, 64 + values, (len(orders), suffixes, 8), generator=generator)

    def __call__(self, generator: torch.Generator, rows: int, entries: int = 8):
        ids = torch.randint(64, 128, (rows * entries, 12), generator=generator)
        order = torch.randint(len(self.orders), (rows * entries,), generator=generator)
        suffix = torch.randint(self.suffixes, (rows * entries,), generator=generator)
        first = torch.randint(8, (rows * entries,), generator=generator)
        labels, depth = torch.full_like(ids, -100), torch.full_like(ids, -1)
        labels[:, -1], depth[:, -1] = self.value[order, suffix, first], torch.tensor(self.orders)[order]
        for i, n in enumerate(self.orders):
            of = order == i
            ids[of, 12 - n] = self.first[i, first[of]]
            ids[of, 13 - n:] = self.letters[i][suffix[of]]
        return tuple(part.view(rows, -1) for part in (ids, labels, depth))


def words(generator: torch.Generator, rows: int, length: int = 96, n_names: int = 4):
    """Words of 4 to 8 bytes, `name4 ` or `name? `: at the space behind ? the label asks for the digit that this name
    had last. Names are 2 to 6 random letters, so that no stride meets the words' ends. The depth is the name's
    length."""
    ids, labels, depth = (torch.full((rows, length + 8), fill) for fill in (ord(" "), -100, -1))
    count = length // 4                                                                      # words at most
    size = torch.randint(2, 7, (rows, n_names), generator=generator).tolist()
    letters = torch.randint(97, 123, (rows, n_names, 6), generator=generator)
    which = torch.randint(n_names, (rows, count), generator=generator).tolist()
    digit = torch.randint(48, 56, (rows, count), generator=generator).tolist()
    asks = (torch.rand(rows, count, generator=generator) < 0.5).tolist()
    for row in range(rows):
        at, known = 0, {}
        for name, value, ask in zip(which[row], digit[row], asks[row]):
            n = size[row][name]
            if at + n + 2 > length:
                break
            ask = ask and name in known
            ids[row, at:at + n] = letters[row, name, :n]
            ids[row, at + n] = ord("?") if ask else value
            at += n + 2
            if ask:
                labels[row, at - 1], depth[row, at - 1] = known[name], n
            else:
                known[name] = value
    return ids[:, :length], labels[:, :length], depth[:, :length]


# ---------------------------------------------------------------------------------------------------------------------
# Training and scores

def fit(config: SpiderConfig, task: Task, steps: int, seed: int, lr: float = 0.013, rows: int = 16,
        prepare: Callable[[Spider], None] = lambda model: None, halting_from: float = 0.125) -> Spider:
    """Train a new model on so many steps of fresh cases, under train.py's optimizers and settings; halting comes in
    over the first part `halting_from` of them."""
    flags = ["--model=tiny", "--schedule=wsd", f"--lr={lr}", f"--warmup_steps={steps // 8}", f"--seed={seed}",
             "--precision=fp32", "--moe_backend=grouped", "--recompute=nothing"]
    plan = train.settle(train.parse_args(flags, environ={}), torch.device("cpu"))
    model = train.build_model(replace(plan, config=config), torch.device("cpu"))
    prepare(model)
    optimizers, generator = Optimizers(model, plan.optimizer), torch.Generator().manual_seed(seed)
    for step in range(steps):
        model.halting_warmup = min(1.0, (step + 1) / max(1, halting_from * steps))
        optimizers.set_lr(lr, train.lr_factor(step, steps, plan.schedule))
        ids, labels, _ = task(generator, rows)
        batches = [Batch.of(ids, labels, step * rows)]
        if train.step_alone(model, optimizers, batches, config.n_loops, plan.optimizer.grad_clip)["skipped"]:
            raise FloatingPointError(f"step {step}: loss or gradient is not finite")
    return model


@contextmanager
def watched(model: Spider):
    """Collect what a forward pass does not report: halting probabilities of loops, and where bytes are cut."""
    halts, cuts, core = [], [], model.core
    halt, boundaries = core.halt, model.boundaries
    core.halt = lambda h: halts.append(halt(h)) or halts[-1]
    model.boundaries = lambda *given: cuts.append(boundaries(*given)) or cuts[-1]
    core.halted_leave = False
    try:
        yield halts, cuts
    finally:
        del core.halt, model.boundaries
        core.halted_leave = None


@torch.no_grad()
def score(model: Spider, task: Task, rows: int = 256) -> dict:
    """Return accuracy by depth of the case, loops until halting by depth, accuracy by bytes since the last cut; of
    cases that no training saw. A depth with fewer than 50 cases is left out."""
    whole = task(torch.Generator().manual_seed(1 << 40), rows)
    ids, labels, depth = (part.flatten() for part in whole)
    model.eval()
    with watched(model) as (halts, cuts):
        logits = model(whole[0]).logits.flatten(0, 1)
    right = (logits.argmax(1) == labels).float()
    cut = cuts[0].round().bool()
    finished = cut.long().cumsum(0)
    at = torch.arange(len(ids))
    since = at - torch.where(cut, at, 0).cummax(0).values
    loops = 1 + (torch.stack(halts)[:-1].cumsum(0) < model.config.act_threshold).sum(0).float()
    loops = loops[(finished - 1).clamp_min(0)]

    def by(case, values):
        kinds = [int(k) for k in case[labels >= 0].unique() if (case[labels >= 0] == k).sum() >= 50]
        return {k: round(float(values[(case == k) & (labels >= 0)].mean()), 4) for k in kinds}
    space = ids == ord(" ")
    return dict(accuracy=by(depth, right), mean=round(float(right[labels >= 0].mean()), 4), loops=by(depth, loops),
                mean_loops=round(float(loops[labels >= 0].mean()), 3), since_cut=by(since, right),
                bytes_per_cut=round(len(ids) / max(1, int(cut.sum())), 3),
                cuts_at_spaces=round(float(cut[space].float().mean()), 3) if space.any() else None)


# ---------------------------------------------------------------------------------------------------------------------
# Arms: name -> (changes of BARE, what fit() takes, preparation of the model)

def start_B(value: float) -> Callable[[Spider], None]:
    """Start the injection B of the pooled segments at a value."""
    def prepare(model):
        torch.nn.init.constant_(model.core.B, value)
    return prepare


def looping():
    for layers, loops in ((1, 1), (1, 4), (4, 1), (2, 2)):
        yield f"{layers} x {loops}", dict(n_recurrent_layers=layers, n_loops=loops), chains, dict(steps=300)


def injection():
    for b in (0.289, 0.5, 1.0, 2.0):      # the first is (1 - A) / (1 - A^4), at which the state keeps its input's size
        yield f"B = {b}", dict(n_loops=4), chains, dict(steps=300, prepare=start_B(b))


@contextmanager
def halted(leave: str):
    """Let segments that have halted leave the core at once, before later ones can read what they halted with, or never:
    then ACT weighs loops and nothing else."""
    class Halting(spider_model.Halting):
        def __init__(self, share, threshold, _, ends):
            super().__init__(share, threshold, False, ends)

        def add(self, h, p, last):
            h = super().add(h, p, last)
            self.active = packing.ALL_ROWS if leave == "never" else packing.ActiveRows(mask=self.share > 0)
            return h

    with mock.patch("spider_model.Halting", Halting):
        yield


def halting():
    for part in (0.0, 0.125, 0.5):
        yield f"warm-up {part}", dict(n_loops=6, act=True), chains, dict(steps=300, halting_from=part)
    for weight in (0.0, 0.01, 0.1):
        yield (f"warm-up 0.5, ponder_weight {weight}", dict(n_loops=6, act=True, ponder_weight=weight), chains,
               dict(steps=300, halting_from=0.5))
    for leave in ("at once", "never"):
        with halted(leave):
            yield f"warm-up 0.125, leave {leave}", dict(n_loops=6, act=True), chains, dict(steps=300)


def engram():
    task = Dictionary((3, 4, 5, 6, 8), 256)
    tables = dict(engram_heads=2, engram_rows=30_000, engram_dim=16)
    bare = dict(n_prelude_layers=1, byte_window=12)
    for name, changes in (
            ("no tables", {}),
            ("byte rate", dict(engram_byte_orders=tuple(range(1, 9)), engram_byte_rows=60_000, engram_byte_dim=16)),
            ("segment rate, cut where keys end", dict(engram_layers=(0,), **tables)),
            ("segment rate, every byte", dict(engram_layers=(0,), boundaries="every_byte", **tables))):
        yield name, bare | changes, task, dict(steps=400)


def segments():
    bare = dict(n_prelude_layers=1, n_coda_layers=1, byte_window=8, n_recurrent_layers=2, boundary_alpha=0.2,
                boundary_prior=0.17)
    for boundaries in ("whitespace", "learned", "flexitokens", "every_third", "every_byte"):
        yield boundaries, bare | dict(boundaries=boundaries), words, dict(steps=400)


MECHANISMS = dict(looping=looping, injection=injection, halting=halting, engram=engram, segments=segments)


def run(name: str, arm: str | None, seed: int):
    """Print a line of JSON for each arm, or for the one that is named."""
    for label, changes, task, settings in MECHANISMS[name]():
        if arm in (None, label):
            start = time.process_time()
            model = fit(SpiderConfig(**BARE | changes), task, seed=seed, **settings)
            line = dict(mechanism=name, arm=label, seed=seed, commit=commit(), **score(model, task),
                        cpu_s=round(time.process_time() - start, 1))
            print(json.dumps(line), flush=True)


# Panels of each plot: (key of the line, its axis, its name)
DEPTH = "hops to the root"
PANELS = dict(
    looping=(("accuracy", DEPTH, "accuracy"),), injection=(("accuracy", DEPTH, "accuracy"),),
    halting=(("accuracy", DEPTH, "accuracy"), ("loops", DEPTH, "loops until halting")),
    engram=(("accuracy", "bytes of the n-gram", "recalled"),),
    segments=(("accuracy", "letters of the name", "accuracy"), ("since_cut", "bytes since the last cut", "accuracy")))


def plot():
    """Draw mechanisms-NAME.png of mechanisms.jsonl: means over seeds, and from the least to the most."""
    from matplotlib.figure import Figure
    lines = [json.loads(line) for line in (DOCS / "mechanisms.jsonl").read_text().splitlines()]
    for name, panels in PANELS.items():
        figure = Figure(figsize=(5.5 * len(panels), 3.8), layout="constrained")
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (key, label, value) in zip(all_axes, panels):
            for arm in dict.fromkeys(line["arm"] for line in lines if line["mechanism"] == name):
                seeds = [line[key] for line in lines if (line["mechanism"], line["arm"]) == (name, arm)]
                depths = sorted({int(depth) for seed in seeds for depth in seed})
                found = [[seed[str(depth)] for seed in seeds if str(depth) in seed] for depth in depths]
                curve, = axes.plot(depths, [sum(f) / len(f) for f in found], "o-", ms=3, label=f"{arm} ({len(seeds)})")
                axes.fill_between(depths, [min(f) for f in found], [max(f) for f in found], alpha=0.2, lw=0,
                                  color=curve.get_color())
            axes.set(xlabel=label, ylabel=value)
            axes.grid(alpha=0.3)
        all_axes[0].legend(title="arm (seeds)", fontsize="small")
        figure.savefig(DOCS / f"mechanisms-{name}.png", dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=(*MECHANISMS, "plot"))
    parser.add_argument("--arm", help="one arm alone, by its name")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    plot() if given.name == "plot" else run(given.name, given.arm, given.seed)
