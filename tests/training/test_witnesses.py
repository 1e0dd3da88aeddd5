"""Compare the numbers of runs with their formulas: losses, optimizers, dropout, tables.

A test runs train.py from its command line, on models of a few thousand weights. It computes in
float64, without the product's functions, what a flag, a field of SpiderConfig or a constant means,
and compares the result with the run's weights, gradients, metrics.jsonl or files. Golden values
pin all other numbers of training.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import SMALL, awake, make_shards, small_config
from recording import Pass, Recording, recorded
from spider.config import SpiderConfig
from spider.training import optim
from tokenizer import PAD_ID

# --------------------------------------------------------------------------------------------------
# Runs

BASE = (
    "--optimizer adamw --precision fp32 --device cpu --seq_len 32 --micro_batch 2 --n_loops 2 "
    "--eval_every 0 --ckpt_every 100"
)
BARE = f"{SMALL},n_recurrent_layers=0,n_coda_layers=0,engram_byte_contexts=,engram_match_contexts="
ONE_LAYER = dict(n_recurrent_layers=1, engram_layers=(0,))


class Runs:
    """Run command lines, each once; make directories of data."""

    def __init__(self, root: Path):
        self.root = root
        self.done = {}  # recordings, by flags, steps and data
        self.starts = {}  # checkpoints, by config
        self.bytes = make_shards(root / "bytes")  # 639 targets: 20 windows of 32

    def bare(self, flags: str = "", **options) -> Recording:
        """Train a byte layer and a head from scratch."""
        return self(f"--model original --set {BARE} {flags}", **options)

    def fresh(self, flags: str, settings: str = "", **options) -> Recording:
        """Train a small model with all components from scratch."""
        fields = f"{SMALL},{settings}".rstrip(",")
        return self(f"--model original --set {fields} {flags}", **options)

    def awake(self, flags: str, changes: dict | None = None, **options) -> Recording:
        """Train a small model with all components and no zero weight, from a checkpoint that has
        only weights."""
        config = small_config(**ONE_LAYER | (changes or {}))
        return self(f"--resume {self.start(config)} --reset_steps {flags}", **options)

    def start(self, config: SpiderConfig) -> Path:
        """Return a checkpoint of an awake model without optimizer state."""
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

    def __call__(self, flags: str, steps: int = 2, data: Path | None = None) -> Recording:
        """Run train.py with these flags, which override BASE."""
        key = flags, steps, data
        if key not in self.done:
            directory = self.root / f"run{len(self.done)}"
            argv = f"{BASE} --data_dir {data or self.bytes} --ckpt_dir {directory} "
            argv += f"--max_steps {steps} {flags}"
            self.done[key] = recorded(directory, argv.split())
        return self.done[key]

    def write(self, name: str, ids) -> Path:
        """Make a directory of training data."""
        directory = self.root / name
        directory.mkdir(exist_ok=True)
        np.asarray(ids, "<u2").tofile(directory / "train-0.bin")
        return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # Muon multiplies in fp32 on any machine.
        patch.setattr(optim, "has_bf16", lambda device: False)
        yield Runs(tmp_path_factory.mktemp("witnesses"))


def compare(seen, expected, tolerance: float = 1e-4):
    """Compare tensors by the norm of their difference, numbers by their ratio."""
    if isinstance(expected, Tensor):
        assert seen.shape == expected.shape
        assert (seen.double() - expected.double()).norm() <= tolerance * expected.double().norm()
    else:
        assert seen == pytest.approx(expected, rel=tolerance, abs=0)


# --------------------------------------------------------------------------------------------------
# Optimizers: two steps, at rates 0.01 and 0.02, of a model with all components

STEPS = (
    "--optimizer muon --lr 0.02 --warmup_steps 1 --weight_decay 0.5 --beta1 0.8 --beta2 0.9 "
    "--momentum 0.7 --engram_lr 0.05 --grad_clip 0"
)
RATES = 0.01, 0.02


def gradients(run: Recording, name: str) -> list[Tensor]:
    """Return the gradients of a parameter in all steps."""
    return [update.gradient[name].double() for update in run.updates]


def averages(numbers: list[Tensor], beta: float) -> list[Tensor]:
    """Return the exponential moving averages of numbers, starting at 0:
    beta * average + (1 - beta) * number."""
    means = [(1 - beta) * numbers[0]]
    for number in numbers[1:]:
        means.append(beta * means[-1] + (1 - beta) * number)
    return means


def adam_directions(g_by_step: list[Tensor], beta1: float, beta2: float) -> list[Tensor]:
    """Return Adam's steps at a rate of 1 (Kingma and Ba 2015), with bias-corrected averages of g
    and g^2."""
    means = averages(g_by_step, beta1)
    squares = averages([g * g for g in g_by_step], beta2)
    return [
        mean / (1 - beta1**n) / ((square / (1 - beta2**n)).sqrt() + 1e-8)
        for n, (mean, square) in enumerate(zip(means, squares, strict=True), 1)
    ]


def muon_directions(g_by_step: list[Tensor], momentum: float) -> list[Tensor]:
    """Return Muon's steps at a rate of 1 for matrices [..., r, c] (Jordan et al. 2024): apply the
    quintic four times to the singular values of Nesterov's momentum, and scale like Moonlight
    (arXiv 2502.16982)."""
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
    """Return the parameters whose optimizer state has a tensor `key`."""
    names = [name for name, state in run.first.state.items() if key in state]
    assert names
    return names


def test_weights_change_by_rate_times_direction_and_decay(runs):
    """Matrices change by -rate * (direction + weight_decay * p), vectors by -rate * direction."""
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
            compare(update.change(name), expected, 1e-3 + rounding_of_fp32)


def test_all_gradients_except_the_tables_are_clipped(runs):
    """Gradients are multiplied by min(1, grad_clip / norm), or unchanged if grad_clip is 0. The
    norm leaves out the tables, which are not clipped."""
    unclipped = runs.awake(STEPS)
    before = unclipped.first.gradient
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in before.values()))
    compare(unclipped.column("grad_norm")[0], norm)
    for largest in (norm / 2, 2 * norm):
        run = runs.awake(f"{STEPS} --grad_clip {largest}", steps=1)
        compare(run.column("grad_norm")[0], norm)
        for name, gradient in before.items():
            compare(run.first.gradient[name], gradient * min(1, largest / norm))
        for name, (_, gradient) in unclipped.first.lookups.items():
            compare(run.first.lookups[name][1], gradient)


# --------------------------------------------------------------------------------------------------
# Losses: two micro-steps of one sequence. The halting warm-up takes an eighth of the horizon, here
# 4 steps, so the first step has 1/4.

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
    """Return the outputs of a module of the core, by call, without padding. Padding comes last in
    the first loop and is dropped after it."""
    return [call.y.double()[: one.segments] for call in one.called[module]]


def outputs(run: Recording, module: str) -> list[list[Tensor]]:
    """Return the outputs of a module of the core in the first step, by pass and call."""
    return [outputs_of(one, module) for one in run.first.passes]


def chosen(scores: Tensor) -> Tensor:
    """Count the tokens of each expert, with two experts per token: scores [n, E] -> [E]."""
    return F.one_hot(scores.topk(2).indices, scores.shape[1]).sum((0, 1)).double()


def mean_over_visits(run: Recording, loss: Callable[[Tensor], Tensor]) -> float:
    """Return the mean of loss(router scores) over all visits of the core's layer."""
    visits = [loss(scores) for one in outputs(run, ROUTER) for scores in one]
    assert len(visits) == 2 * 3  # passes, loops
    return float(torch.stack(visits).mean())


def test_aux_loss_is_expert_load_times_mean_probability(runs):
    """aux_loss_weight * sum_e f_e * P_e. f_e: the expert's tokens relative to an even load. P_e:
    its mean probability."""

    def loss(scores):
        even_load = 2 * len(scores) / 4
        return chosen(scores) / even_load @ scores.softmax(-1).mean(0)

    run = runs.awake(LOSSES, steps=1)
    compare(run.lines[0]["aux_loss"], 0.5 * mean_over_visits(run, loss))


def test_z_loss_is_the_routers_mean_squared_log_partition(runs):
    """z_loss_weight * mean(logsumexp(router scores)^2)."""
    run = runs.awake(LOSSES, steps=1)
    mean = mean_over_visits(run, lambda scores: scores.logsumexp(-1).square().mean())
    compare(run.lines[0]["z_loss"], 0.25 * mean)


def test_expert_bias_moves_by_the_sign_of_the_missing_load(runs):
    """A step moves the bias, 0 at first, by expert_bias_rate * sign(mean load - load). The load
    sums all loops and micro-steps; with 16 experts, a partial sum has different signs. The balance
    is the largest load relative to the mean, averaged over layers."""
    run = runs.awake(LOSSES, dict(n_routed_experts=16, n_recurrent_layers=2), steps=1)
    weights = run.saved(1)["model_state_dict"]
    balances = []
    for moe in ("core.layers.0.moe", "core.layers.1.moe"):
        load = sum(chosen(scores) for one in outputs(run, f"{moe}.router") for scores in one)
        balances.append(float(load.max() / load.mean()))
        compare(weights[f"{moe}.expert_bias"], 0.05 * (load.mean() - load).sign())
    compare(run.lines[0]["expert_balance"], np.mean(balances))


def test_ponder_loss_is_loops_plus_remainder_times_the_halting_warmup(runs):
    """ponder_weight * warm-up * (loops + remainder). If a segment runs all loops, its remainder is
    1 - the sum of its earlier probabilities. The warm-up multiplies these probabilities, too."""
    run = runs.awake(LOSSES, steps=1)
    costs = []
    for first, second, _ in outputs(run, HALTING):
        remainder = 1 - WARMUP * (first.sigmoid() + second.sigmoid())
        costs.append(3 + float(remainder.mean()))
    compare(run.lines[0]["ponder_loss"], 0.125 * WARMUP * np.mean(costs), 1e-5)


def test_segment_halts_when_its_probability_reaches_act_threshold(runs):
    """A segment halts in the first of two loops if warm-up * probability >= act_threshold."""

    def probabilities(run):
        return [first.sigmoid() for first, *_ in outputs(run, HALTING)]

    threshold = WARMUP * float(torch.cat(probabilities(runs.awake(LOSSES, steps=1))).mean())
    run = runs.awake(f"{LOSSES},act_threshold={threshold} --n_loops 2", steps=1)
    loops = [1 + float((WARMUP * p < threshold).double().mean()) for p in probabilities(run)]
    assert 1.1 < np.mean(loops) < 1.9
    compare(run.lines[0]["mean_loops"], np.mean(loops))


def test_boundary_loss_is_the_distance_of_boundaries_per_byte_to_the_band(runs):
    """boundary_loss_weight * the distance of boundaries per byte to the band
    [alpha - lambda * sigma, alpha]."""
    below = runs.awake(LOSSES, steps=1).lines[0]
    compare(below["boundary_loss"], 2 * (0.9 - 2 * 0.1 - 1 / below["bytes_per_segment"]))
    above = runs.awake(f"{LOSSES},boundary_alpha=0.1", steps=1).lines[0]
    compare(above["boundary_loss"], 2 * (1 / above["bytes_per_segment"] - 0.1))


def padded(runs: Runs) -> Path:
    """Make data that is two fifths PAD, in runs of 40, so that windows differ in their number of
    targets."""
    position = np.arange(640)
    return runs.write("padded", np.where(position % 100 < 40, PAD_ID, position % 26 + 97))


def labels_of(passes: list[Pass]) -> Tensor:
    """Return the labels of passes [M]; the passes must differ in their number of targets."""
    labels = [one.given["labels"].flatten() for one in passes]
    assert len({int((part != -100).sum()) for part in labels}) > 1
    return torch.cat(labels)


def test_core_loss_is_the_mean_nats_of_the_core_alone(runs):
    """core_loss_weight * the mean nats over all targets when only the core predicts."""
    flags = "--micro_batch 1 --grad_accum 4 --set core_loss_weight=0.5"
    run = runs.awake(flags, steps=1, data=padded(runs))
    passes = run.first.passes
    alone = torch.cat([one.called["lm_head"][1].y.double() for one in passes])
    nats = float(F.cross_entropy(alone, labels_of(passes), ignore_index=-100))
    compare(run.lines[0]["core_loss"], 0.5 * nats)


def test_surprise_loss_is_the_squared_error_of_the_predicted_nats(runs):
    """0.001 * the mean of (ln(272) + surprise - nats)^2 in the first step."""
    run = runs.fresh("", "boundaries=learned,boundary_rate=0.25", steps=1)
    (one,) = run.first.passes
    predicted = math.log(272) + one.called["boundary_predictor"][0].y[:, 0].double()
    logits = one.called["lm_head"][0].y.double()
    nats = F.cross_entropy(logits, one.given["labels"].flatten(), reduction="none")
    compare(run.lines[0]["surprise_loss"], 0.001 * float((predicted - nats).square().mean()))


def test_total_loss_is_the_sum_of_all_terms(runs):
    """The terms are the loss in nats and the losses above."""
    line = runs.awake(LOSSES, steps=1).lines[0]
    names = "loss boundary_loss aux_loss z_loss ponder_loss core_loss".split()
    compare(line["total_loss"], sum(line[name] for name in names))


def test_all_targets_of_a_step_weigh_equally_in_loss_and_gradient(runs):
    """A target's weight does not depend on the number of targets in its micro-step. PAD is no
    target."""
    run = runs.bare("--micro_batch 1 --grad_accum 4 --grad_clip 0", data=padded(runs))
    for update, line in zip(run.updates, run.lines, strict=True):
        calls = [one.called["lm_head"][0] for one in update.passes]
        labels = labels_of(update.passes)
        counted = labels != -100
        targets = labels[counted]
        logits = torch.cat([call.y for call in calls]).double()[counted]
        compare(line["loss"], float(F.cross_entropy(logits, targets)))
        error = logits.softmax(-1) - F.one_hot(targets, 272)
        inputs = torch.cat([call.x for call in calls]).double()[counted]
        compare(update.gradient["lm_head.weight"], error.T @ inputs / len(error))


# --------------------------------------------------------------------------------------------------
# Dropout and tables by epoch. A step and an epoch are both 4 windows of 32.


def four_windows(runs: Runs) -> Path:
    return runs.write("short", np.arange(129) % 26 + 97)


def without_padding(tokens: Tensor) -> Tensor:
    """Drop zero tokens, the padding of the core."""
    return tokens[tokens.any(dim=1)]


def test_dropout_grows_over_ten_epochs_and_is_a_fifth_at_bytes(runs):
    """At the core's input and output the rate is 0 in the first epoch, half of --dropout in the
    sixth, and --dropout from the eleventh on. At bytes, before and after the core, the rate is a
    fifth of the core's."""
    run = runs.fresh(
        "--dropout 0.5 --micro_batch 4 --n_loops 1",
        "boundary_prior=0.8,boundary_loss_weight=0",
        steps=12,
        data=four_windows(runs),
    )
    assert run.column("epoch") == [*range(12)]
    for step, rate in ((1, 0.0), (6, 0.25), (11, 0.5), (12, 0.5)):
        update = run.updates[step - 1]
        called = update.passes[0].called
        # Where dropout zeroes the core's input, its layer reads only the loop embedding.
        core_input = called["core.layers.0"][0].x - update.before["core.loop_embedding"][0]
        core_output = called["core.out_proj"][0].x
        for x, expected in (
            (called["boundary_predictor"][0].x, rate / 5),
            (core_input, rate),
            (core_output, rate),
            (called["coda.0"][0].x, rate / 5),
        ):
            compare(float((without_padding(x) == 0).double().mean()), expected, 0.15)
        # Kept values are scaled by 1 / (1 - rate); without dropout the mean square is 1.
        compare(float(without_padding(core_output).square().mean()), 1 / (1 - rate), 0.15)


def test_engram_reset_clears_tables_after_the_first_step_of_epoch_two(runs):
    """After the first step of the second epoch all tables are 0."""
    for flag, cleared in (("--engram_reset", True), ("--no-engram_reset", False)):
        run = runs.fresh(f"{flag} --micro_batch 4", data=four_windows(runs))
        weights = run.saved(2)["model_state_dict"]
        assert [not weights[name].any() for name in run.first.lookups] == [cleared] * 3
        assert run.updates[1].before["engram_input.table.weight"].any()


# --------------------------------------------------------------------------------------------------
# Horizons in bytes (64 per step), and the start of a run


def test_target_param_data_ratio_excludes_the_lookup_memories(runs):
    """Entries of Engram tables and of the match memory do not count as parameters."""
    run = runs.fresh("--target_param_data_ratio 20", steps=1)
    counted = [
        p.numel()
        for name, p in run.first.before.items()
        if not name.endswith((".table.weight", ".followed"))
    ]
    assert run.saved(1)["flags"]["target_tokens"] == 20 * sum(counted)


def test_target_flops_counts_weights_and_attention_over_half_the_sequence(runs):
    """A byte takes 6 FLOPs per weight of a product. Attention to half the sequence takes two
    products, with keys and values, and twice as much again in the backward pass."""
    run = runs.bare("--target_flops 1e9", steps=1)
    weights = [
        p.numel() for name, p in run.first.before.items() if p.ndim == 2 and name != "embed_tokens"
    ]
    heads, head_width, sequence = 2, 16, 32
    attention = 3 * (2 * 2 * head_width * heads) * sequence / 2
    expected = math.ceil(1e9 / (6 * sum(weights) + attention))
    assert run.saved(1)["flags"]["target_tokens"] == expected


HEAD = "lm_head.weight"


def test_reset_steps_takes_only_the_weights_of_a_checkpoint(runs):
    """The run repeats the first step with the checkpoint's weights."""
    start = runs.bare()
    run = runs.bare(f"--resume {start.checkpoint(2)} --reset_steps", steps=1)
    assert run.column("step") == [1]
    compare(run.first.passes[0].given["input_ids"], start.first.passes[0].given["input_ids"])
    compare(run.first.before[HEAD], start.updates[1].after[HEAD], 0)
    compare(run.first.state[HEAD]["exp_avg"], 0.1 * run.first.gradient[HEAD])
