"""The optimizer step, the schedule, casts of weights, evaluation, samples, timing."""

import json
import math
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch

import train
from conftest import (
    ROOT,
    SMALL,
    assert_same,
    awake,
    final_state,
    gradients,
    metrics,
    prepare,
    resolved,
    small_config,
    text,
    weights_of,
    world_of,
)
from data import Batch, Loader, mock_source, validation_sets
from jobs import command
from preparing import source
from spider.training.fp8 import convert_to_fp8
from spider.training.run import RunProgress
from spider_model import Spider
from tokenizer import decode

# A name of its own: conftest times no step
from train import (
    Flags,
    StepSettings,
    clears_tables,
    lr_factor,
    settings_of_step,
    time_steps,
)

NOW = StepSettings(n_loops=2)


# --------------------------------------------------------------------------------------------------
# The step


def test_a_step_without_a_target_has_a_loss_of_zero():
    ids = text(2, 32)
    batch = Batch.of(ids, torch.full_like(ids, -100), 0)
    assert train.accumulate(awake(small_config()), [batch], NOW)["loss"] == 0


def test_several_skipped_steps_in_a_row_end_the_run_and_leave_its_checkpoints(
    train_small, error_of
):
    directory = train_small("--ckpt_every 1", steps=2)
    saved = {path: path.read_bytes() for path in directory.glob("*.pt")}
    flags = "--lr 1000 --warmup_steps 0 --grad_clip 0 --eval_every 0 --max_skipped 3"
    assert "lower --lr" in error_of(flags, steps=40, status=1)
    assert all(path.read_bytes() == content for path, content in saved.items())
    lines = metrics(directory)
    steps = lines[-1]["step"]
    assert steps < 40
    assert [line["skipped"] for line in lines][-3:] == [True] * 3
    assert None in [line["grad_norm"] for line in lines]
    # also where these steps are the last, and where no further one is left
    for _ in range(2):
        assert "lower --lr" in error_of(flags, steps=steps, status=1)
    assert "settings differ" in error_of(flags, "--lr 0.1", steps=steps)


@pytest.mark.slow
def test_one_step_of_the_1b_model_runs_in_bf16(tmp_path, run_on):
    """64 bytes, in a process that returns its 15 GB. By 8-bit AdamW, since Muon's 18 TFLOP take
    minutes without AMX."""
    argv = """
        --mock_data --model 1b --precision bf16 --seq_len 64 --micro_batch 1 --max_steps 1
        --eval_every 0 --ckpt_dir run --device cpu --optimizer adamw8bit
    """.split()
    run_on(1, argv)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert 4 < line["loss"] < 8 and math.isfinite(line["grad_norm"]) and 4 < line["memory"] < 24


# --------------------------------------------------------------------------------------------------
# The schedule

FLAGS = Flags(warmup_steps=10, min_lr_fraction=0.1)
WSD = replace(FLAGS, schedule="wsd", wsd_decay_fraction=0.2)


SCHEDULES = Flags.__dataclass_fields__["schedule"].metadata["choices"]

RATES = (
    (FLAGS, 40, 100, 0.1 + 0.9 * 0.75),  # a third of the way, and cos(pi / 3) is 0.5
    (WSD, 80, 100, 1.0),
    (WSD, 91, 100, 0.1 + 0.9 * 0.5),
    (replace(WSD, wsd_decay_fraction=0.0), 119, 100, 1.0),
)


@pytest.mark.parametrize("flags, step, horizon, factor", RATES)
def test_the_rate_of_a_step_is_that_of_its_schedule_and_of_no_other(flags, step, horizon, factor):
    assert lr_factor(step, horizon, flags) == pytest.approx(factor)
    for other in {*SCHEDULES} - {flags.schedule}:
        other_factor = lr_factor(step, horizon, replace(flags, schedule=other))
        assert abs(other_factor - factor) > 0.05, f"{other} has the same rate: choose another step"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_and_ends_at_its_minimum(schedule):
    flags = replace(FLAGS, schedule=schedule)
    assert lr_factor(4, 100, flags) == pytest.approx(5 / 11)
    assert lr_factor(10, 10, flags) == 1
    assert lr_factor(11, 11, flags) == pytest.approx(0.1)  # one step after the warm-up
    assert lr_factor(0, 100, replace(flags, warmup_steps=0)) == 1


def test_each_schedule_has_its_rates_in_the_table_and_others_are_refused():
    missing = {*SCHEDULES} - {flags.schedule for flags, *_ in RATES}
    assert not missing, f"{missing}: add a step's rate by the formula to RATES"
    with pytest.raises(ValueError, match="'none such' has no rates"):
        lr_factor(70, 100, replace(FLAGS, schedule="none such"))


def mixture(*parts: tuple[int, float]) -> Loader:
    """Return a loader of sequences of one byte; parts: the bytes and the weight of each source."""
    return Loader([source([0] * (size + 1), weight=weight) for size, weight in parts], 1, 0)


def test_dropout_of_a_mixture_follows_the_epochs_of_its_sources():
    loader = mixture((7000, 0.7), (300, 0.3))

    def first_of_epoch(epoch: int) -> int:
        """Return the first sequence of an epoch of the second source, counted from 0."""
        return next(g for g in range(10_000) if loader.epochs(g)[1] == epoch)

    second = first_of_epoch(1)
    eighth = first_of_epoch(7)
    assert 700 < second < 1400  # its share of the first sequences is not exactly 0.3
    expected = {
        0: 0,
        second - 1: 0,
        second: 0.5 * 0.3 * 0.1,
        eighth: 0.5 * 0.3 * 0.7,
        10_000: 0.5 * (0.7 * 0.1 + 0.3),
        10**6: 0.5,
    }
    for first, rate in expected.items():
        assert train.dropout_at(Flags(dropout=0.5), loader, first) == pytest.approx(rate)


@pytest.mark.parametrize(
    "target_tokens, first, epoch, clears",
    (
        (1500, 99, 0, False),
        (1500, 100, 0, True),
        (1499, 100, 0, False),
        (1500, 100, 1, False),
    ),
)
def test_tables_are_cleared_in_the_step_that_begins_an_epoch_if_half_of_it_is_left(
    target_tokens, first, epoch, clears
):
    """An epoch has 100 sequences of 10 bytes."""
    flags = Flags(engram_reset=True, seq_len=10, target_tokens=target_tokens)
    progress = RunProgress(bytes_seen=10 * first, epoch=epoch)
    now = settings_of_step(flags, Loader([source([0] * 1001)], 10, 0), progress, horizon=1000)
    assert now.clears_tables == clears


def cleared_at(loader: Loader, target_tokens: int) -> list[int]:
    """Return the first sequence of each epoch for which tables are cleared, of 5,000 sequences."""
    flags = Flags(engram_reset=True, target_tokens=target_tokens, seq_len=1)
    epochs = [loader.epoch(g) for g in range(5000)]
    begun = [g for g in range(1, 5000) if epochs[g] > epochs[g - 1]]
    return [g for g in begun if clears_tables(flags, loader, g)]


def test_tables_of_a_mixture_are_cleared_once_a_pass_over_all_of_it():
    equal = mixture((500, 0.5), (500, 0.5))
    cleared = cleared_at(equal, 5000)
    assert len(cleared) == 4
    for times, first in enumerate(cleared, 1):
        assert math.isclose(first, 1000 * times, abs_tol=100)
    assert len(cleared_at(equal, 4650)) == 4 and len(cleared_at(equal, 4350)) == 3
    small_source_read_five_times = mixture((100_000, 0.9), (100, 0.1))
    assert cleared_at(small_source_read_five_times, 5000) == []


# --------------------------------------------------------------------------------------------------
# Casts of weights, compilation


# Nats by which losses of `tiny` in bf16 may differ from those in fp32. The largest difference is
# not bounded, since a step with a spike differs by up to 1.2.
FIRST_STEPS = 0.0015  # the most in the first six steps, before differences grow
SHIFT = 0.002  # in the median
SPREAD = 0.006  # in the median, without the sign
# Measured on a CPU, from two starts (docs/results/performance.jsonl):
#
#     bf16                                                    0.0004   0.0004   0.0030
#     attention whose output is zero for the last 100 rows    0.0027   0.0006   0.0035
#     attention whose output projections never learn          0.0114   0.0082   0.0085


@pytest.mark.gpu
@pytest.mark.slow
def test_tiny_has_the_losses_of_a_cpu_on_a_gpu_but_for_rounding(tmp_path):
    """300 steps on the text of this repository, from the same weights."""
    names = "README.md docs spider tests train.py data.py sample.py spider_model.py tile_moe.py"
    inputs = [ROOT / name for name in names.split()]
    assert prepare(*inputs, "--ext=.py,.md", "--out", tmp_path / "data") == 0
    flags = """
        --model tiny --data_dir data --seq_len 4096 --micro_batch 1 --target_tokens 1228800
        --eval_every 0 --dropout 0 --no-engram_reset
    """
    # a GPU draws other weights from a seed
    same_weights = "--resume start --reset_steps"
    losses = {}
    for name, others in (
        ("start", "--device cpu --precision fp32 --max_steps 1"),
        ("cpu", f"--device cpu --precision fp32 {same_weights}"),
        ("gpu", f"--device cuda --precision bf16 --compile off {same_weights}"),
    ):
        argv = f"{flags} {others} --ckpt_dir {name}".split()
        done = command(*argv, cwd=tmp_path, OMP_NUM_THREADS="4")  # minutes on the CPU
        assert done.returncode == 0, done.stderr
        losses[name] = [line["loss"] for line in metrics(tmp_path / name)]
    assert len(losses["cpu"]) == 300
    differences = np.subtract(losses["gpu"], losses["cpu"])
    sizes = abs(differences)
    assert max(sizes[:6]) < FIRST_STEPS
    assert abs(median(differences)) < SHIFT
    assert median(sizes) < SPREAD


def test_a_run_leaves_products_of_fp32_without_tf32(train_small):
    train_small("--precision bf16", steps=1)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("fp8, experts", ((False, False), (True, False), (True, True)))
def test_weights_cast_once_for_all_loops_and_micro_steps_give_the_same_gradient(
    fp8, experts, monkeypatch
):
    """The casts are counted: with recomputation, two loops and two micro-steps, each Linear's
    weight once."""
    model = awake(small_config())
    model.compute_dtype = torch.bfloat16
    model.recompute = "all"
    ids = text(2, 64)
    if fp8:
        convert_to_fp8(model, torch.device("cpu"), experts, ids.numel())
    casts = []

    def counted(cast_weight):
        return lambda dtype: casts.append(cast_weight(dtype))

    linears = [module for module in model.modules() if hasattr(module, "cast_weight")]
    for linear in linears:
        monkeypatch.setattr(linear, "cast_weight", counted(linear.cast_weight))
    grads = []
    for scope in (nullcontext, model.cast_weights_once):
        model.zero_grad()
        with scope():
            for noise_seed in range(2):
                model(ids, ids, noise_seed=noise_seed).loss.backward()
        grads.append({name: grad.clone() for name, grad in gradients(model).items()})
    assert len(casts) == len(linears)
    assert all(linear.cast is None for linear in linears)  # the next step has other weights
    cast_each_time, cast_once = grads
    for name, gradient in cast_each_time.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(cast_once[name], gradient, rtol=0.03, atol=0.01 * largest)


def test_the_warm_up_passes_change_nothing():
    model = awake(small_config())
    before = weights_of(model)
    random_state = torch.get_rng_state()
    plan = resolved(*"--micro_batch 2 --seq_len 32 --n_loops 2".split())
    ids = text(2, 32)
    train.warm_up(model, plan, Batch.of(ids, ids, 0))
    assert torch.equal(random_state, torch.get_rng_state())
    assert {*gradients(model).values()} == {None}
    assert_same(before, weights_of(model))


# --------------------------------------------------------------------------------------------------
# Evaluation and samples


def test_evaluation_is_the_same_for_every_batch_size_and_changes_nothing():
    model = awake(small_config())
    rows = validation_sets([mock_source(0)], 32, 1000)
    before = weights_of(model)
    random_state = torch.get_rng_state()
    results = [train.evaluate(model, rows, size, 2, world_of()) for size in (1, 3, 32)]
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)
    assert model.training
    assert torch.equal(random_state, torch.get_rng_state())
    assert_same(before, weights_of(model))


def test_a_mixture_is_validated_source_by_source_and_as_a_whole(
    tmp_path, shards, train_small, new_log
):
    """The second source is one byte again and again, which is soon predicted better."""
    (tmp_path / "same").mkdir()
    for name in ("train", "val"):
        np.full(400, 65, "<u2").tofile(tmp_path / "same" / f"{name}-0.bin")
    names = [str(shards), str(tmp_path / "same")]
    sources = f"{names[0]}:1,{names[1]}:3"
    directory = train_small(f"--data_dir {sources} --eval_tokens 400", steps=4)
    last = metrics(directory)[-1]
    first, second = (last[f"val_bpb/{name}"] for name in names)
    assert second < first
    assert 400 * last["val_bpb"] == pytest.approx(100 * first + 300 * second, rel=1e-3)
    assert f"validation of {names[1]}: bpb {second:.4f}" in new_log()


def test_a_run_ends_with_a_sample_that_continues_a_prompt_or_held_out_text(
    shards, train_small, new_log
):
    """Once, also if --sample_every is due, and without control characters but line breaks."""
    held_out = decode(np.fromfile(shards / "val-0.bin", "<u2")[:32].tolist())
    text = b"a\n\x1bb\tc"

    class Writing(Spider):
        def generate(self, prompt, n_bytes, **_):
            return iter(text)

    for flags, prompt in (
        ("", held_out[-40:]),
        ("--sample_prompt abc --sample_every 2", "abc"),
        ("--eval_every 0", "\n"),
    ):
        train_small(flags, steps=2, ckpt=f"run{flags}", model=Writing)
        log = new_log()
        assert log.count(" continues ") == 1
        lines = log.partition(f"step 2 continues {prompt!r}:\n")[2].splitlines()
        assert [line.partition(" ")[2] for line in lines[:2]] == ["    a", "    \\x1bb      c"]


def test_a_sample_has_the_loops_of_training_and_leaves_the_model_training_also_if_it_fails(new_log):
    model = awake(small_config())
    loops = []

    def generate(*_, n_loops, **__):
        loops.append(n_loops)
        raise RuntimeError("not for decoding")

    model.generate = generate
    train.machine.start_log()
    train.log_sample(model, 1, train.Flags(n_loops=3), {})
    assert loops == [3] and model.training
    assert "no sample: not for decoding" in new_log()


def test_a_sample_ends_when_its_time_is_over(monkeypatch, new_log):
    model = awake(small_config())
    model.generate = lambda *_, **__: iter(b"xy")
    monkeypatch.setattr(train, "SAMPLE_SECONDS", 0.0)
    train.machine.start_log()
    train.log_sample(model, 1, train.Flags(), {})
    assert new_log().endswith("    x\n")


def test_ruined_weights_are_reported_instead_of_sampled(tmp_path, trained, train_small, new_log):
    state = final_state(trained)
    state["model_state_dict"]["lm_head.weight"][0, 0] = math.nan
    ruined = tmp_path / "ruined.pt"
    torch.save(state, ruined)
    train_small("--sample_every 1 --resume", ruined, steps=4, status=1)
    assert "step 4: no sample" in new_log()


# --------------------------------------------------------------------------------------------------
# Other weights, timing


def test_a_run_from_other_weights_evaluates_before_its_first_step(trained, train_small, new_log):
    begin = ("--reset_steps --resume", trained)
    train_small(*begin, steps=3)
    _, first, after = new_log().partition("before the first step:")
    val_loss = metrics(trained)[-1]["val_loss"]
    assert f", loss {val_loss:.4f} nats" in after.partition("step 1/3")[0]
    train_small(*begin, steps=4)  # resumes
    train_small(*begin, "--eval_every 0", steps=3, ckpt="other")
    assert first not in new_log()


def test_steps_of_a_subclass_that_cannot_be_copied_are_timed_and_its_memory_is_freed(monkeypatch):
    """Also if the model refers to itself. torch frees what the collector has freed before."""
    models = []
    freed = []

    class WithLock(Spider):
        def __init__(self, config):
            super().__init__(config)
            self.lock = threading.Lock()
            self.itself = [self]
            models.append(weakref.ref(self))

    monkeypatch.setattr(train, "MIN_SECONDS_TIMED", 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(models[-1]() is None))
    flags = f"--device cpu --compile off --seq_len 32 --set {SMALL}"
    plan = resolved(*flags.split(), model_class=WithLock)
    assert time_steps(plan, world_of(), Loader([mock_source(0)], 32, 0)) > 0
    assert freed == [True]


def test_minutes_are_refused_on_several_ranks(run_on):
    argv = "--mock_data --model tiny --minutes 1 --ckpt_dir run --device cpu".split()
    assert "--minutes times steps on one process" in run_on(2, argv, status=2)
