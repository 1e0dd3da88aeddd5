"""A witness for every flag: a number that a run shows, and the formula that gives it.

A row of the table is a function under `witness`, which names its flags. It runs train.py by its
command line, on models of some thousand weights. It yields pairs (seen, expected): what the run
shows in weights, gradients, products, metrics.jsonl, log or files, and what follows from the
meaning of the flag. The second is computed here, in float64 and without the product's functions. So
a flag that is ignored, or taken for another, fails. UNWITNESSED lists the other flags, with the
reason.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import train
from conftest import SMALL, awake, make_shards, small_config, text, world_of
from recording import Pass, Recording, Update, recorded
from spider import optim
from spider.config import SpiderConfig
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID

UNWITNESSED = {
    "--profile": "a trace, by a profiler that stays in its process: test_run has one of its own"
}
TABLE = []  # of functions, with the names of what they are witnesses for


def witness(*names: str):
    """Enter a function into the table, as a witness for flags, fields of SpiderConfig or
    constants."""

    def enter(function: Callable) -> Callable:
        TABLE.append(pytest.param(function, id=" ".join(names)))
        return function

    return enter


# --------------------------------------------------------------------------------------------------
# Runs

BASE = (
    "--optimizer adamw --precision fp32 --device cpu --seq_len 32 --micro_batch 2 --n_loops 2 "
    "--eval_every 0 --ckpt_every 100"
)
BARE = f"{SMALL},n_recurrent_layers=0,n_coda_layers=0,engram_byte_contexts=,engram_match_contexts="
ONE_LAYER = dict(n_recurrent_layers=1, engram_layers=(0,))


def joined(*settings: str) -> str:
    """Join values of --set, of which the last one of a field counts."""
    return ",".join(filter(None, settings))


class Runs:
    """Runs by command line, each made once; directories of data by name."""

    def __init__(self, root: Path):
        self.root = root
        self.done = {}  # recordings, by what was asked for
        self.starts = {}  # checkpoints, by config
        self.data = {"bytes": make_shards(root / "bytes")}  # 639 targets: 20 windows of 32

    def bare(self, flags: str = "", settings: str = "", **options) -> Recording:
        """Train a byte layer and a head from scratch."""
        return self(f"--model original --set {joined(BARE, settings)} {flags}", **options)

    def fresh(self, flags: str = "", settings: str = "", **options) -> Recording:
        """Train a small model with all components from scratch."""
        return self(f"--model original --set {joined(SMALL, settings)} {flags}", **options)

    def awake(self, flags: str, changes: dict | None = None, **options) -> Recording:
        """Train a small model with all components, in which no weight is 0. It begins from a
        checkpoint of weights alone."""
        config = small_config(**ONE_LAYER | (changes or {}))
        return self(f"--resume {self.start(config)} --reset_steps {flags}", **options)

    def start(self, config: SpiderConfig) -> Path:
        """Return a checkpoint of an awake model without an optimizer's state."""
        path = self.starts.setdefault(str(config), self.root / f"awake{len(self.starts)}.pt")
        if not path.exists():
            state = dict(
                model_state_dict=awake(config).state_dict(),
                optimizer_state_dict={},
                step=0,
                cfg=asdict(config),
                recipe="original",
            )
            torch.save(state, path)
        return path

    def __call__(
        self, flags: str, steps: int = 2, data: str = "bytes", status: int = 0
    ) -> Recording:
        """Run train.py with these flags, which override BASE; check its exit status."""
        key = flags, steps, data
        if key not in self.done:
            directory = self.root / f"run{len(self.done)}"
            argv = f"{BASE} --data_dir {self.data.get(data, data)} --ckpt_dir {directory} "
            argv += f"--max_steps {steps} {flags}"
            self.done[key] = recorded(directory, argv.split())
        assert self.done[key].status == status, self.done[key].log
        return self.done[key]

    def write(self, name: str, ids) -> str:
        """Make a directory of training data."""
        self.data[name] = self.root / name
        self.data[name].mkdir(exist_ok=True)
        np.asarray(ids, "<u2").tofile(self.data[name] / "train-0.bin")
        return name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    torch.use_deterministic_algorithms(False)
    with pytest.MonkeyPatch.context() as patch:
        # Muon multiplies in fp32 on any machine.
        patch.setattr(optim, "multiplies_bf16", lambda device: False)
        # --deterministic sets these two.
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # A run that ignores --max_steps ends, too.
        patch.setenv("TARGET_TOKENS", "6400")
        yield Runs(tmp_path_factory.mktemp("witnesses"))


def compare(seen, expected, tolerance: float = 1e-4):
    """Compare tensors by the norm of their difference, floats by their ratio, all else for
    equality."""
    if isinstance(expected, Tensor):
        assert seen.shape == expected.shape
        assert (seen.double() - expected.double()).norm() <= tolerance * expected.double().norm()
        return
    first = expected[0] if isinstance(expected, list) and expected else expected
    if isinstance(first, float):
        assert seen == pytest.approx(expected, rel=tolerance, abs=0)
    else:
        assert seen == expected


# --------------------------------------------------------------------------------------------------
# Rates: 8 steps to the horizon, 2 beyond it

SCHEDULE = "--lr 0.008 --warmup_steps 2 --min_lr_fraction 0.25 --target_tokens 512"


def rates(decay: Callable[[float], float]) -> list[float]:
    """Return lr * n / 3 for the steps n = 1, 2 of the warm-up; then the decay, from 1 to 0 in 6
    steps, above the minimum."""
    warmup = [0.008 * n / 3 for n in (1, 2)]
    return warmup + [0.008 * (0.25 + 0.75 * decay(min(1, n / 6))) for n in range(8)]


@witness("--lr", "--warmup_steps", "--min_lr_fraction")
def cosine(runs):
    """By default half a cosine."""
    run = runs.bare(SCHEDULE, steps=10)
    yield run.column("lr"), rates(lambda done: (1 + math.cos(math.pi * done)) / 2)


@witness("--schedule", "--wsd_decay_fraction")
def wsd(runs):
    """Constant, then linear in the last half."""
    run = runs.bare(f"{SCHEDULE} --schedule wsd --wsd_decay_fraction 0.5", steps=10)
    yield run.column("lr"), rates(lambda done: min(1, (1 - done) / 0.5))


# --------------------------------------------------------------------------------------------------
# Optimizers: two steps, at rates of 0.01 and 0.02, of all parameters of a model with all components

STEPS = (
    "--optimizer muon --lr 0.02 --warmup_steps 1 --weight_decay 0.5 --beta1 0.8 --beta2 0.9 "
    "--momentum 0.7 --engram_lr 0.05 --grad_clip 0"
)
RATES = 0.01, 0.02


def gradients(run: Recording, name: str) -> list[Tensor]:
    """Return the gradients of a parameter in all steps."""
    return [update.gradient[name].double() for update in run.updates]


def averages(numbers: list[Tensor], beta: float) -> list[Tensor]:
    """Return the exponential moving averages of numbers: beta * average + (1 - beta) * number, from
    0 on."""
    means = [(1 - beta) * numbers[0]]
    for number in numbers[1:]:
        means.append(beta * means[-1] + (1 - beta) * number)
    return means


def adam_directions(g_by_step: list[Tensor], beta1: float, beta2: float) -> list[Tensor]:
    """Return Adam's steps at a rate of 1 (Kingma and Ba 2015). The averages of g and g^2 are
    corrected for their start."""
    means = averages(g_by_step, beta1)
    squares = averages([g * g for g in g_by_step], beta2)
    return [
        mean / (1 - beta1**n) / ((square / (1 - beta2**n)).sqrt() + 1e-8)
        for n, (mean, square) in enumerate(zip(means, squares, strict=True), 1)
    ]


def muon_directions(g_by_step: list[Tensor], momentum: float) -> list[Tensor]:
    """Return Muon's steps at a rate of 1 for matrices [..., r, c] (Jordan et al. 2024): the
    singular values of Nesterov's momentum go through the quintic four times. The size is
    Moonlight's (arXiv 2502.16982)."""
    directions = []
    for g, average in zip(g_by_step, averages(g_by_step, momentum), strict=True):
        nesterov = (1 - momentum) * g + momentum * average
        u, values, v = torch.linalg.svd(nesterov, full_matrices=False)
        values = values / values.norm(dim=-1, keepdim=True)
        for _ in range(4):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        directions.append(0.2 * math.sqrt(max(g.shape[-2:])) * u @ (values[..., None] * v))
    return directions


def parameters_with(key: str, run: Recording) -> list[str]:
    """Return the parameters whose optimizer keeps a tensor `key` for each."""
    names = [name for name, state in run.first.state.items() if key in state]
    assert names
    return names


@witness("--beta1", "--beta2", "--momentum")
def moving_averages(runs):
    """Adam's state has averages of g and g^2, Muon's of g."""
    run = runs.awake(STEPS)
    for key, beta, power in (
        ("exp_avg", 0.8, 1),
        ("exp_avg_sq", 0.9, 2),
        ("momentum_buffer", 0.7, 1),
    ):
        for name in parameters_with(key, run):
            numbers = [g**power for g in gradients(run, name)]
            for update, expected in zip(run.updates, averages(numbers, beta), strict=True):
                yield update.state[name][key], expected


@witness("--weight_decay", "steps of both optimizers")
def changes_of_weights(runs):
    """p changes by -rate * (direction + weight_decay * p), a vector by -rate * direction."""
    run = runs.awake(STEPS)
    adam = parameters_with("exp_avg", run)
    directions = {name: adam_directions(gradients(run, name), 0.8, 0.9) for name in adam}
    muon = parameters_with("momentum_buffer", run)
    directions |= {name: muon_directions(gradients(run, name), 0.7) for name in muon}
    for name in directions:
        for update, rate, direction in zip(run.updates, RATES, directions[name], strict=True):
            before = update.before[name].double()
            decay = 0.5 if before.ndim >= 2 else 0.0
            expected = -rate * (direction + decay * before)
            rounding_of_fp32 = 1e-7 * before.norm() / expected.norm().clamp_min(1e-12)
            yield update.change(name), expected, 1e-3 + rounding_of_fp32


def sums_by_row(rows: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Sum numbers [n, ...] that belong to the same of `count` rows [n]."""
    sums = torch.zeros(count, *numbers.shape[1:], dtype=torch.float64)
    return sums.index_add_(0, rows, numbers)


@witness("--engram_lr")
def rows_of_tables(runs):
    """In its first step a row changes by engram_lr, as a root mean square, against the sum of its
    gradients, however often it was looked up. All other rows stay, since there is no decay."""
    first = runs.awake(STEPS).first
    for name, (rows, gradient) in first.lookups.items():
        count = len(first.before[name])
        sums = sums_by_row(rows, gradient.double(), count)
        size = sums.square().mean(1).sqrt()
        change = first.change(name)
        yield change, -0.05 * sums / size.clamp_min(1e-30)[:, None]
        lookups = torch.bincount(rows, minlength=count)
        assert lookups.max() > 1
        yield change[lookups == 0].count_nonzero(), 0


@witness("--grad_clip")
def clipping(runs):
    """Gradients reach the optimizers times min(1, grad_clip / norm), or unchanged if grad_clip is
    0. The norm is that of all parameters but the tables, which are not clipped."""
    unclipped = runs.awake(STEPS)
    before = unclipped.first.gradient
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in before.values()))
    yield unclipped.column("grad_norm")[0], norm
    for largest in (norm / 2, 2 * norm):
        run = runs.awake(f"{STEPS} --grad_clip {largest}", steps=1)
        yield run.column("grad_norm")[0], norm
        for name, gradient in before.items():
            yield run.first.gradient[name], gradient * min(1, largest / norm)
        for name, (_, gradient) in unclipped.first.lookups.items():
            yield run.first.lookups[name][1], gradient


@witness("--optimizer")
def optimizers(runs):
    """Matrices have Muon's state by default, Adam's under adamw. Under adamw8bit a state of 4,096
    numbers has 8 bits each."""
    matrix = "prelude.0.attention.q_a_proj.weight"
    large = "lm_head.weight"
    for flag, name, key, size in (
        ("auto", matrix, "momentum_buffer", 4),
        ("adamw", matrix, "exp_avg", 4),
        ("adamw8bit", matrix, "state1", 4),
        ("adamw8bit", large, "state1", 1),
    ):
        state = runs.bare(f"--optimizer {flag}", steps=1).first.state[name]
        yield state[key].element_size(), size


LEARNED = "boundaries=learned,boundary_rate=0.25"


@witness("relative rate of learned boundaries")
def rate_of_the_regression(runs):
    """Its rate is an eighth of lr."""
    first = runs.fresh("--lr 0.01 --warmup_steps 0", LEARNED, steps=1).first
    for name in ("boundary_predictor.regression.0.bias", "boundary_predictor.regression.2.bias"):
        (direction,) = adam_directions([first.gradient[name].double()], 0.9, 0.95)
        yield first.change(name), -0.01 / 8 * direction, 1e-3


@witness("--max_skipped")
def skipped_steps(runs):
    """The run ends with status 1 after so many steps in a row that are not finite."""
    state = torch.load(runs.bare().checkpoint(2), weights_only=True)
    state["model_state_dict"]["lm_head.weight"][0, 0] = math.nan
    torch.save(state, runs.root / "nan.pt")
    run = runs(f"--resume {runs.root / 'nan.pt'} --reset_steps --max_skipped 3", steps=9, status=1)
    yield run.column("skipped"), [True] * 3


# --------------------------------------------------------------------------------------------------
# Loss: two micro-steps of a row; an eighth of the horizon is 4 steps, so that the first has a
# halting warm-up of 1/4

WEIGHTS = (
    "aux_loss_weight=0.5,z_loss_weight=0.25,ponder_weight=0.125,boundary_loss_weight=2,"
    "boundary_alpha=0.9,boundary_lambda=2,boundary_sigma=0.1,expert_bias_rate=0.05"
)
LOSSES = (
    f"--micro_batch 1 --grad_accum 2 --seq_len 64 --n_loops 3 --target_tokens 4096 --set {WEIGHTS}"
)
WARMUP = 1 / 4
ROUTER = "core.layers.0.moe.router"
HALTING = "core.halt_predictor"


def outputs_of(one: Pass, module: str) -> list[Tensor]:
    """Return the outputs of a module of the core, by call. Rows of padding are left out: they are
    the last ones in the first loop, and are dropped after it."""
    return [call.y.double()[: one.segments] for call in one.called[module]]


def outputs(run: Recording, module: str) -> list[list[Tensor]]:
    """Return the outputs of a module of the core in the first step, by pass and call."""
    return [outputs_of(one, module) for one in run.first.passes]


def chosen(scores: Tensor) -> Tensor:
    """Count the tokens of each expert, with two experts a token: scores [n, E] -> [E]."""
    return F.one_hot(scores.topk(2).indices, scores.shape[1]).sum((0, 1)).double()


def mean_over_visits(run: Recording, loss: Callable[[Tensor], Tensor]) -> float:
    """Return the mean of loss(router scores) over all visits of the core's layer."""
    visits = [loss(scores) for one in outputs(run, ROUTER) for scores in one]
    assert len(visits) == 2 * 3  # passes, loops
    return float(torch.stack(visits).mean())


@witness("aux_loss_weight")
def load_balance(runs):
    """aux_loss_weight * sum_e f_e * P_e. f is an expert's tokens relative to an even load, P its
    mean probability."""

    def loss(scores):
        even_load = 2 * len(scores) / 4
        return chosen(scores) / even_load @ scores.softmax(-1).mean(0)

    run = runs.awake(LOSSES, steps=1)
    yield run.lines[0]["aux_loss"], 0.5 * mean_over_visits(run, loss)


@witness("z_loss_weight")
def log_partition(runs):
    """z_loss_weight * the mean squared log-partition of the router."""
    run = runs.awake(LOSSES, steps=1)
    mean = mean_over_visits(run, lambda scores: scores.logsumexp(-1).square().mean())
    yield run.lines[0]["z_loss"], 0.25 * mean


@witness("expert_bias_rate", "expert_balance")
def selection_bias(runs):
    """A step moves the bias, 0 at first, by expert_bias_rate * sign(mean load - load). The load is
    that of all loops and micro-steps; with 16 experts, that of a part has other signs. The balance
    is the largest load relative to the mean, on average over layers."""
    run = runs.awake(LOSSES, dict(n_routed_experts=16, n_recurrent_layers=2), steps=1)
    weights = run.saved(1)["model_state_dict"]
    balances = []
    for moe in ("core.layers.0.moe", "core.layers.1.moe"):
        load = sum(chosen(scores) for one in outputs(run, f"{moe}.router") for scores in one)
        balances.append(float(load.max() / load.mean()))
        yield weights[f"{moe}.expert_bias"], 0.05 * (load.mean() - load).sign()
    yield run.lines[0]["expert_balance"], np.mean(balances)


@witness("ponder_weight", "HALTING_WARMUP")
def ponder(runs):
    """ponder_weight * warm-up * (loops + remainder). For a segment that only the last loop ends,
    the remainder is 1 - the sum of its probabilities before. The warm-up multiplies these, too."""
    run = runs.awake(LOSSES, steps=1)
    costs = []
    for first, second, _ in outputs(run, HALTING):
        remainder = 1 - WARMUP * (first.sigmoid() + second.sigmoid())
        costs.append(3 + float(remainder.mean()))
    yield run.lines[0]["ponder_loss"], 0.125 * WARMUP * np.mean(costs), 1e-5


@witness("act_threshold")
def halting(runs):
    """A segment halts in the first of two loops if its probability, times the warm-up, reaches
    act_threshold."""

    def probabilities(run):
        return [first.sigmoid() for first, *_ in outputs(run, HALTING)]

    threshold = WARMUP * float(torch.cat(probabilities(runs.awake(LOSSES, steps=1))).mean())
    run = runs.awake(f"{LOSSES},act_threshold={threshold} --n_loops 2", steps=1)
    loops = [1 + float((WARMUP * p < threshold).double().mean()) for p in probabilities(run)]
    assert 1.1 < np.mean(loops) < 1.9
    yield run.lines[0]["mean_loops"], np.mean(loops)


@witness("boundary_loss_weight", "boundary_alpha", "boundary_lambda", "boundary_sigma")
def band_of_boundaries(runs):
    """boundary_loss_weight * the distance between the boundaries per byte and the band
    [alpha - lambda * sigma, alpha]."""
    below = runs.awake(LOSSES, steps=1).lines[0]
    yield below["boundary_loss"], 2 * (0.9 - 2 * 0.1 - 1 / below["bytes_per_segment"])
    above = runs.awake(f"{LOSSES},boundary_alpha=0.1", steps=1).lines[0]
    yield above["boundary_loss"], 2 * (1 / above["bytes_per_segment"] - 0.1)


@witness("boundary_prior")
def prior(runs):
    """The boundary predictor begins with a bias of logit(boundary_prior)."""
    first = runs.fresh("", "boundary_prior=0.2", steps=1).first
    yield float(first.before["boundary_predictor.2.bias"]), math.log(0.2 / 0.8)


@witness("boundary_rate")
def rate_of_boundaries(runs):
    """A segment has 1 / boundary_rate bytes in the first step. Further boundaries, at ends of
    documents and random ones, are few."""
    run = runs.fresh("--lr 0.01 --warmup_steps 0", LEARNED, steps=1)
    yield run.lines[0]["bytes_per_segment"], 1 / 0.25, 0.1


def padded(runs: Runs) -> str:
    """Make data of which two fifths are PAD, 40 bytes at a time, so that windows have unlike
    numbers of targets."""
    position = np.arange(640)
    return runs.write("padded", np.where(position % 100 < 40, PAD_ID, position % 26 + 97))


def labels_of(passes: list[Pass]) -> Tensor:
    """Return the labels of passes [M], of which not all have equally many targets."""
    labels = [one.given["labels"].flatten() for one in passes]
    assert len({int((part != -100).sum()) for part in labels}) > 1
    return torch.cat(labels)


@witness("core_loss_weight")
def loss_of_the_core(runs):
    """core_loss_weight * the mean over all targets of the nats by which the core alone predicts
    them."""
    flags = "--micro_batch 1 --grad_accum 4 --set core_loss_weight=0.5"
    run = runs.awake(flags, steps=1, data=padded(runs))
    passes = run.first.passes
    alone = torch.cat([one.called["lm_head"][1].y.double() for one in passes])
    nats = float(F.cross_entropy(alone, labels_of(passes), ignore_index=-100))
    yield run.lines[0]["core_loss"], 0.5 * nats


@witness("weight of the boundaries' own loss")
def surprise(runs):
    """0.001 * the mean of (ln(272) + surprise - nats)^2 in the first step."""
    run = runs.fresh("--lr 0.01 --warmup_steps 0", LEARNED, steps=1)
    (one,) = run.first.passes
    predicted = math.log(272) + one.called["boundary_predictor"][0].y[:, 0].double()
    logits = one.called["lm_head"][0].y.double()
    nats = F.cross_entropy(logits, one.given["labels"].flatten(), reduction="none")
    yield run.lines[0]["surprise_loss"], 0.001 * float((predicted - nats).square().mean())


@witness("sum of the losses")
def total_loss(runs):
    """The loss in nats, and the terms above."""
    line = runs.awake(LOSSES, steps=1).lines[0]
    names = "loss boundary_loss aux_loss z_loss ponder_loss core_loss".split()
    yield line["total_loss"], sum(line[name] for name in names)


@witness("weight of a micro-step")
def micro_steps(runs):
    """All targets of a step have the same weight in its loss and gradient, however few are in a
    micro-step. PAD is no target."""
    run = runs.bare("--micro_batch 1 --grad_accum 4 --grad_clip 0", data=padded(runs))
    for update, line in zip(run.updates, run.lines, strict=True):
        calls = [one.called["lm_head"][0] for one in update.passes]
        labels = labels_of(update.passes)
        counted = labels != -100
        targets = labels[counted]
        logits = torch.cat([call.y for call in calls]).double()[counted]
        yield line["loss"], float(F.cross_entropy(logits, targets))
        error = logits.softmax(-1) - F.one_hot(targets, 272)
        inputs = torch.cat([call.x for call in calls]).double()[counted]
        yield update.gradient["lm_head.weight"], error.T @ inputs / len(error)


# --------------------------------------------------------------------------------------------------
# Dropout and tables by epoch: 4 windows of 32 in each step and epoch


def four_windows(runs: Runs) -> str:
    return runs.write("short", np.arange(129) % 26 + 97)


def without_padding(rows: Tensor) -> Tensor:
    """Leave out rows of zeros, which pad the core's."""
    return rows[rows.any(dim=1)]


@witness("--dropout", "DROPOUT_EPOCHS")
def dropout(runs):
    """At the core's input and output the rate is 0 in the first epoch, half of --dropout in the
    sixth, all of it from the eleventh on. At bytes, before and after the core, it is a fifth of
    that."""
    run = runs.fresh(
        "--dropout 0.5 --micro_batch 4 --n_loops 1",
        "boundary_prior=0.8,boundary_loss_weight=0",
        steps=12,
        data=four_windows(runs),
    )
    yield run.column("epoch"), [*range(12)]
    for step, rate in ((1, 0.0), (6, 0.25), (11, 0.5), (12, 0.5)):
        update = run.updates[step - 1]
        called = update.passes[0].called
        # Where the core's input is dropped, its layer reads only the embedding of the loop.
        core_input = called["core.layers.0"][0].x - update.before["core.loop_embedding"][0]
        core_output = called["core.out_proj"][0].x
        for x, expected in (
            (called["boundary_predictor"][0].x, rate / 5),
            (core_input, rate),
            (core_output, rate),
            (called["coda.0"][0].x, rate / 5),
        ):
            yield float((without_padding(x) == 0).double().mean()), expected, 0.15
        # What is kept grows by 1 / (1 - rate), from a mean square of 1.
        yield float(without_padding(core_output).square().mean()), 1 / (1 - rate), 0.15


@witness("--engram_reset", "--no-engram_reset")
def cleared_tables(runs):
    """After the first step of the second epoch all rows are 0."""
    for flag, cleared in (("--engram_reset", True), ("--no-engram_reset", False)):
        run = runs.fresh(f"{flag} --micro_batch 4", data=four_windows(runs))
        weights = run.saved(2)["model_state_dict"]
        yield [not weights[name].any() for name in run.first.lookups], [cleared] * 3
        yield run.updates[1].before["engram_input.table.weight"].any(), True


# --------------------------------------------------------------------------------------------------
# Batches and their order


def rows_of(run: Recording) -> Tensor:
    """Return the sequences of all steps in order."""
    return torch.cat([one.given["input_ids"] for update in run.updates for one in update.passes])


@witness("--seq_len", "--micro_batch", "--grad_accum", "--global_batch")
def batches(runs):
    """A step has grad_accum passes of micro_batch sequences of seq_len bytes, or as many passes as
    make global_batch bytes. The sequences are the same, however they are split."""
    whole = runs.bare("--micro_batch 4 --seq_len 16")
    for flags, passes, sequences in (
        ("--micro_batch 4", 1, 4),
        ("--micro_batch 2 --grad_accum 2", 2, 2),
        ("--micro_batch 1 --global_batch 64", 4, 1),
    ):
        run = runs.bare(f"{flags} --seq_len 16")
        for update in run.updates:
            shapes = [one.given["input_ids"].shape for one in update.passes]
            yield shapes, [(sequences, 16)] * passes
        yield run.column("bytes_seen"), [64, 128]
        yield rows_of(run), rows_of(whole)


def seed_of(purpose: str, seed: int, step: int) -> int:
    """Return the number below 2^62 from which all randomness of a step derives."""
    digest = blake2b(f"{purpose}:{seed}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


@witness("--seed")
def seed(runs):
    """Another seed gives other weights, another order, other noise, another text. The noise of a
    step's row i is that of its seed + i."""
    zero = runs.bare()
    three = runs.bare("--seed 3 --micro_batch 1 --grad_accum 2")
    weights = [run.first.before["lm_head.weight"] for run in (zero, three)]
    yield torch.equal(*weights), False
    yield torch.equal(rows_of(three), rows_of(zero)), False
    for step, update in enumerate(three.updates):
        of_step = seed_of("noise", 3, step)
        yield [one.given["noise_seed"] for one in update.passes], [of_step, of_step + 1]
    flags = "--mock_data --micro_batch 64"
    words, other_words = (words_of(runs.bare(f"{flags} --seed {n}", steps=1)) for n in (0, 3))
    yield len(words & other_words) < len(words) / 2, True


def words_of(run: Recording) -> set[bytes]:
    """Return the words of a run's sequences, without the first and last one of each, which may be
    cut."""
    words = set()
    for row in rows_of(run).tolist():
        text = bytes(number for number in row if number < 256)
        words.update(text.replace(b".", b"").split()[1:-1])
    return words


@witness("--data_dir")
def mixture(runs):
    """Three of four sequences are from the source of weight 3. Which ones they are depends on the
    seed."""
    a, b = (runs.data[runs.write(letter, [ord(letter)] * 1000)] for letter in "ab")
    first_bytes = []
    for seed in (0, 3):
        flags = f"--seq_len 4 --micro_batch 400 --seed {seed}"
        first_bytes.append(rows_of(runs.bare(flags, steps=1, data=f"{a}:3,{b}:1"))[:, 0])
    yield float((first_bytes[0] == ord("a")).double().mean()), 0.75, 0.05
    yield torch.equal(*first_bytes), False


@witness("--mock_data")
def mock_data(runs):
    """Sentences of syllables, whatever --data_dir holds."""
    ids = {*rows_of(runs.bare("--mock_data --micro_batch 64 --seed 0", steps=1)).flatten().tolist()}
    yield ids <= {*b"bdfgklmnprstaeiou .", BOS_ID, EOS_ID} and len(ids) > 10, True


# --------------------------------------------------------------------------------------------------
# Horizons in bytes, of which a step has 64; and where a run begins


@witness("--max_steps")
def most_steps(runs):
    yield len(runs.bare("", steps=3).lines), 3


@witness("--target_tokens")
def bytes_of_training(runs):
    yield len(runs.bare("--target_tokens 130", steps=0).lines), math.ceil(130 / 64)


@witness("--minutes")
def minutes(runs):
    """At 1,000 bytes/s, as if timed by conftest.do_nothing_slow."""
    yield runs.bare("--minutes 0.003").saved(2)["flags"]["target_tokens"], 0.003 * 60 * 1000


@witness("--target_param_data_ratio")
def bytes_per_parameter(runs):
    """Rows of tables and of matches, which are looked up, do not count as parameters."""
    run = runs.fresh("--target_param_data_ratio 20", steps=1)
    counted = [
        p.numel()
        for name, p in run.first.before.items()
        if not name.endswith((".table.weight", ".followed"))
    ]
    yield run.saved(1)["flags"]["target_tokens"], 20 * sum(counted)


@witness("--target_flops")
def flops(runs):
    """A byte takes 6 FLOPs for each weight of a product, and attention to half the sequence: two
    products, with keys and values, and twice that again in the backward pass."""
    run = runs.bare("--target_flops 1e9", steps=1)
    weights = [
        p.numel() for name, p in run.first.before.items() if p.ndim == 2 and name != "embed_tokens"
    ]
    heads, head_width, sequence = 2, 16, 32
    attention = 3 * (2 * 2 * head_width * heads) * sequence / 2
    yield run.saved(1)["flags"]["target_tokens"], math.ceil(1e9 / (6 * sum(weights) + attention))


HEAD = "lm_head.weight"


@witness("--resume")
def resumed(runs):
    """The step after the checkpoint's, with its weights, its optimizer's state and its position in
    the data."""
    start = runs.bare()
    whole = runs.bare("", steps=3)
    run = runs.bare(f"--resume {start.checkpoint(2)}", steps=3)
    yield len(run.updates), 1
    yield run.lines[-1]["bytes_seen"], 3 * 64
    yield rows_of(run), rows_of(whole)[4:]
    yield run.first.before[HEAD], start.updates[1].after[HEAD], 0
    yield run.first.state[HEAD]["exp_avg"], whole.updates[2].state[HEAD]["exp_avg"]


@witness("--reset_steps")
def reset(runs):
    """The first step again, with the checkpoint's weights alone."""
    start = runs.bare()
    run = runs.bare(f"--resume {start.checkpoint(2)} --reset_steps", steps=1)
    yield run.column("step"), [1]
    yield rows_of(run), rows_of(start)[:2]
    yield run.first.before[HEAD], start.updates[1].after[HEAD], 0
    yield run.first.state[HEAD]["exp_avg"], 0.1 * run.first.gradient[HEAD]


@witness("epoch of a run whose data grew")
def epoch_of_grown_data(runs):
    """60 windows are three epochs of 20, and not yet one of 80."""
    first = runs.bare("--micro_batch 20", steps=3)
    yield first.saved(3)["epoch"], 2
    grown = runs.write("grown", np.arange(2560) % 26 + 97)
    run = runs.bare(f"--micro_batch 20 --resume {first.checkpoint(3)}", steps=4, data=grown)
    yield run.saved(4)["epoch"], 0


# --------------------------------------------------------------------------------------------------
# Model


@witness("--model")
def presets(runs):
    """Of 100 steps, `small` warms up in 6 and `original` in 10; `small` has a window of 64 bytes,
    `original` none."""
    for name, steps, window in (("small", 6, 64), ("original", 10, 0)):
        state = runs.bare(f"--model {name} --dropout 0", steps=1).saved(1)
        yield (state["flags"]["warmup_steps"], state["cfg"]["byte_window"]), (steps, window)


@witness("--set")
def settings(runs):
    yield runs.bare("", "hidden_size=48", steps=1).first.before[HEAD].shape, (272, 48)


@witness("--n_loops")
def loops(runs):
    """Without halting every segment visits the layers so many times. So it is in evaluation, and if
    the model was built for fewer loops."""
    run = runs.awake("--n_loops 3 --eval_every 1", dict(act=False), steps=1)
    yield run.column("mean_loops"), [3.0]
    for one in (run.first.passes[0], run.evaluated[0]):
        yield len(one.called["core.layers.0"]), 3


@witness("--random_loops")
def random_loops(runs):
    """A Poisson draw of mean --n_loops, at least 1, by seed and step."""
    run = runs.bare("--random_loops --n_loops 2 --seed 3", steps=8)
    draws = [np.random.default_rng(seed_of("loops", 3, step)).poisson(2) for step in range(8)]
    assert 0 in draws
    loops = [update.passes[0].given["n_loops"] for update in run.updates]
    yield loops, [max(1, draw) for draw in draws]


# --------------------------------------------------------------------------------------------------
# Machine


@witness("--device")
def device(runs):
    yield {p.device.type for p in runs.bare("--device cpu").first.before.values()}, {"cpu"}
    if not torch.cuda.is_available():
        yield "no CUDA device" in runs.bare("--device cuda", status=2).log, True


def rounded(x: Tensor, largest: float | None = None) -> Tensor:
    """Round a tensor to e4m3, scaled by its largest number. If a bound of that is known, the scale
    is a power of 2."""
    scale = 448 / x.abs().max() if largest is None else 2.0 ** math.floor(math.log2(448 / largest))
    return (x * scale).float().to(torch.float8_e4m3fn).double() / scale


@witness("--precision")
def products(runs):
    """A product of fp32, bf16 or e4m3 numbers. The results of the last are bf16, or fp32 where bf16
    is emulated."""
    name = "prelude.0.ffn.gate_up_proj"
    for precision, tolerance, dtype in (
        ("fp32", 1e-6, torch.float32),
        ("bf16", 4e-3, torch.bfloat16),
        ("fp8", 1e-2, None),
    ):
        first = runs.bare(f"--precision {precision}", steps=1).first
        x, y = first.passes[-1].called[name][0]
        weight = first.before[f"{name}.weight"].double()
        if precision == "fp8":  # x is normalized, which bounds it
            x = rounded(x.double(), largest=math.sqrt(x.shape[1]))
            weight = rounded(weight)
        else:
            yield y.dtype, dtype
            x = x.to(dtype).double()
            weight = weight.to(dtype).double()
        yield y, x @ weight.T, tolerance


@witness("--fp8_experts")
def experts(runs):
    """The routed experts are off by about 6.4% with e4m3 numbers, by less than 1% with bf16.
    Rounding to three bits is off by 2.6% (root mean square); the inputs and weights of three
    products are rounded independently."""
    for flag, low, high in (("--fp8_experts", 0.05, 0.08), ("", 0, 0.01)):
        flags = f"--precision fp8 --seq_len 64 {flag}"
        first = runs.fresh(flags, "n_shared_experts=0", steps=1).first
        seen = []
        expected = []
        for one in first.passes:
            x, y = one.called["core.layers.0.moe"][0]  # in the first loop
            seen.append(y[: one.segments].double())
            scores = one.called[ROUTER][0].y[: one.segments].double()
            expected.append(routed_experts(first, x[: one.segments].double(), scores))
        exact = torch.cat(expected)
        error = (torch.cat(seen) - exact).norm() / exact.norm()
        yield low < float(error) < high, True


def routed_experts(update: Update, x: Tensor, scores: Tensor) -> Tensor:
    """Return what the two best experts of each token give: x [N, D], scores [N, E] -> [N, D]."""
    name = "core.layers.0.moe.w_"
    w_gate, w_up, w_down = (update.before[name + part].double() for part in ("gate", "up", "down"))
    of_each = (F.silu(x @ w_gate) * (x @ w_up)) @ w_down  # [E, N, D]
    best = scores.topk(2)
    weights = torch.zeros_like(scores).scatter(1, best.indices, best.values.softmax(-1))
    return torch.einsum("ne,end->nd", weights, of_each)


class Operations(TorchDispatchMode):
    """Count operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.__name__] += 1
        return operation(*args, **kwargs or {})


@witness("--moe_backend")
def backends(runs):
    """A visit of `grouped` has two grouped products, and for each of these two more in the backward
    pass. `loop` has none."""
    for backend, products in (("grouped", 2 * 2 * 3), ("loop", 0)):
        with Operations() as operations:
            runs.fresh(f"--moe_backend {backend} --n_loops 2", steps=1)
        yield operations.counts["_grouped_mm.default"], products


@witness("--recompute", "--no_gradient_checkpointing")
def recomputation(runs):
    """A layer of which nothing is kept is computed twice, in each of two loops and at byte rate."""
    for flag, core, byte_layer in (
        ("--recompute core", 4, 1),
        ("--recompute all", 4, 2),
        ("--recompute all --no_gradient_checkpointing", 2, 1),
    ):
        called = runs.fresh(f"{flag} --n_loops 2", steps=1).first.passes[0].called
        yield len(called["core.layers.0.attention.q_a_proj"]), core
        yield len(called["prelude.0.attention.q_a_proj"]), byte_layer


@witness("--compile")
def compilation(runs):
    """torch.compile gets the functions of byte layers and, under bf16, of the core and its
    parts."""
    in_bf16 = ["Block", "RecurrentCore", "RecurrentBlock", "SegmentEngram"]
    for flags, expected in (("--compile --precision bf16", in_bf16), ("--compile off", [])):
        compiled = []

        def compile(function, compiled=compiled, **_):
            compiled.append(function.__qualname__)
            return function

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", compile)
            runs.fresh(flags, steps=1)
        suffix = ".in_one_graph"
        yield [name.removesuffix(suffix) for name in compiled if name.endswith(suffix)], expected


@witness("--deterministic")
def deterministic(runs):
    """torch's deterministic algorithms are on in this run, and in no other."""
    runs.bare()
    before = torch.are_deterministic_algorithms_enabled()
    runs.bare("--deterministic", steps=1)
    after = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield (before, after), (False, True)


@witness("--shards", "--rank_timeout")
def ranks(runs):
    """Four ranks are two replicas of two shards. They wait for one another for the timeout."""
    seen = []

    def make_mesh(_, shape, **__):
        seen.append(shape)
        raise RuntimeError("the others are not there")

    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4).items():
            patch.setenv(name, str(value))
        patch.setattr(dist, "rendezvous", lambda *_, timeout: iter([(dist.HashStore(), 0, 4)]))
        patch.setattr(dist, "init_process_group", lambda *_, timeout, **__: seen.append(timeout))
        patch.setattr(dist, "init_device_mesh", make_mesh)
        runs.bare("--shards 2 --rank_timeout 7.5", status=2)
    yield seen, [timedelta(seconds=7.5), (2, 2)]


# --------------------------------------------------------------------------------------------------
# Checkpoints, evaluation, log


@witness("--ckpt_dir", "--ckpt_every", "--keep_last")
def checkpoints(runs):
    """Steps 2, 4, 6, 8 and the last are saved, the newest three are kept."""
    run = runs.bare("--ckpt_every 2 --keep_last 3", steps=9)
    yield run.saved_steps, [6, 8, 9]


@witness("--eval_every")
def evaluations(runs):
    run = runs.bare("--eval_every 2", steps=5)
    yield [line["step"] for line in run.lines if "val_loss" in line], [2, 4, 5]


def nats_of(model: Spider, ids: Tensor, labels: Tensor) -> tuple[float, int]:
    """Return the nats and the number of a row's targets, in evaluation mode."""
    with torch.no_grad():
        logits = model.eval()(ids[None]).logits[0].double()
    nats = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return float(nats), int((labels != -100).sum())


@witness("--eval_tokens")
def validation_loss(runs):
    """The mean over the first eval_tokens targets of the validation data, in windows of seq_len."""
    run = runs.bare("--eval_every 2 --eval_tokens 100")
    state = run.saved(2)
    model = Spider(SpiderConfig(**state["cfg"]))
    model.load_state_dict(state["model_state_dict"])
    saved = np.fromfile(runs.data["bytes"] / "val-0.bin", "<u2")
    ids = torch.from_numpy(saved[:101].astype(np.int64))
    windows = zip(ids[:100].split(32), ids[1:].split(32), strict=True)
    nats = sum(nats_of(model, *window)[0] for window in windows)
    yield run.lines[-1]["val_loss"], nats / 100
    yield run.lines[-1]["val_bpb"], nats / 100 / math.log(2)
    yield run.lines[-1]["val_bytes_per_segment"], 100.0  # all bytes, since there is no segment


@witness("evaluation on two ranks")
def shared_evaluation(runs):
    """The mean over all targets of five rows. In batches of two, the second rank has a row less."""
    model = awake(small_config(boundaries="words", **ONE_LAYER))
    ids = text(5, 32)
    labels = text(5, 32, seed=1)
    labels[1, 3:] = -100
    labels[2, 9:] = -100
    world = world_of()
    world.ranks = 2
    of_first = []
    world.sum = lambda values: of_first.append(values) or values
    train.evaluate(model, {"": (ids, labels)}, 2, 2, world)
    world.rank = 1
    world.sum = lambda values: values + of_first[0]
    found = train.evaluate(model, {"": (ids, labels)}, 2, 2, world)
    rows = [nats_of(model, *row) for row in zip(ids, labels, strict=True)]
    targets = [count for _, count in rows]
    yield found["val_loss"], sum(nats for nats, _ in rows) / sum(targets)
    yield of_first[0][1], targets[0] + targets[1] + targets[4]


# At growing rates the loss soon grows.
WORSE = "--lr 10 --warmup_steps 200 --eval_every 1 --patience 3"


@witness("--patience")
def patience(runs):
    """The run ends after three evaluations in a row that are worse than the best one."""
    losses = runs.bare(f"{WORSE} --ckpt_every 1 --keep_best", steps=20).column("val_loss")
    yield len(losses), 1 + int(np.argmin(losses)) + 3


@witness("--keep_best")
def best(runs):
    """The best one is saved when it is found, and kept beside the newest two."""
    for flags, later in (
        ("--ckpt_every 100 --keep_best", (0, 3)),
        ("--ckpt_every 100", (3,)),
        ("--ckpt_every 1 --keep_best", (0, 2, 3)),
        ("--ckpt_every 1", (2, 3)),
    ):
        run = runs.bare(f"{WORSE} {flags}", steps=20)
        best = 1 + int(np.argmin(run.column("val_loss")))
        yield run.saved_steps, [best + steps for steps in later]


@witness("--sample_every", "--sample_prompt")
def samples(runs):
    """Another seed or step gives another text of the same weights, which rates of 0 leave as they
    are."""
    flags = "--sample_every 1 --sample_prompt abc --lr 1e-20 --engram_lr 0"
    texts = set()
    for seed in (0, 3):
        run = runs.awake(f"{flags} --seed {seed}", dict(expert_bias_rate=0.0))
        texts.update(line.partition("continues")[2] for line in run.logged("continues 'abc': "))
    yield len(texts), 4


@witness("--log_every")
def log(runs):
    """The first step, every second one, the last."""
    run = runs.bare("--log_every 2", steps=5)
    yield re.findall(r"step (\d)/5 .*\| loss ", run.log), ["1", "2", "4", "5"]


@witness("--run")
def wandb(runs):
    """wandb gets the name of the run, and each line of metrics.jsonl."""
    names = []
    losses = []

    def init(name, **_):
        names.append(name)
        return SimpleNamespace(id="id", finish=lambda: None, log=log)

    def log(numbers, step):
        losses.append(numbers["loss"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
        run = runs.bare("--run smoke")
    yield names, ["smoke"]
    yield losses, run.column("loss")


@witness("--dry_run")
def dry_run(runs):
    """It prints the number of steps, and makes no directory."""
    run = runs.bare("--dry_run --target_tokens 640", steps=0)
    yield "run: 10 steps of 64 bytes" in run.printed, True
    shorter = runs.bare("--dry_run --target_tokens 640", steps=3)
    yield "run: 3 steps of 64 bytes" in shorter.printed, True
    yield run.directory.exists(), False


@witness("--config")
def config_file(runs):
    path = runs.root / "flags.toml"
    path.write_text("lr = 0.5\nwarmup_steps = 1\n")
    yield runs.bare(f"--config {path}", steps=1).column("lr"), [0.25]


# --------------------------------------------------------------------------------------------------
# The test


@pytest.mark.parametrize("row", TABLE)
def test_a_run_shows_what_the_formula_gives(row, runs):
    for seen, expected, *tolerance in row(runs):
        compare(seen, expected, *tolerance)


def test_every_flag_has_a_witness_or_a_reason_for_none(capsys):
    with pytest.raises(SystemExit):
        train.command_line(["--help"])
    flags = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    witnessed = [name for row in TABLE for name in row.id.split() if name.startswith("--")]
    missing = {*flags} - {*witnessed, *UNWITNESSED}
    assert not missing, f"no witness for {missing}: see `Add a flag`, 3, in CONTRIBUTING.md"
    assert sorted([*witnessed, *UNWITNESSED]) == sorted(flags)
