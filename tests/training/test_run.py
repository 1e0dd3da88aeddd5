"""A run in progress: spikes and noise, patience, metrics.jsonl, the log, wandb, the profiler."""

import itertools
import math
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import SMALL, final_state, last_step, metrics, model_with_fault, run_python
from spider import machine
from spider.config import SpiderConfig
from spider.training import estimate
from spider.training.checkpoint import best_checkpoint
from spider.training.run import STOPS, Metrics, RunProgress, StepEvents, StopSignals
from spider_model import Spider

# --------------------------------------------------------------------------------------------------
# Spikes and explosions


def after_losses(*losses: float) -> RunProgress:
    """Return the progress of a run with these losses."""
    progress = RunProgress()
    for loss in losses:
        progress.watch(loss)
    return progress


def is_spike(*losses: float) -> bool:
    """Return whether the last of these losses is a spike."""
    *before, last = losses
    return after_losses(*before).watch(last)


def test_spike_is_a_loss_far_above_the_largest_of_the_last_64():
    assert [is_spike(*[1.0] * count, 1.21) for count in (19, 20)] == [False, True]
    assert not is_spike(*[1.0] * 20, 1.19)
    assert [is_spike(2.0, *[1.0] * count, 2.3) for count in (63, 64)] == [False, True]


def test_four_losses_far_above_the_lowest_level_are_an_explosion():
    def exploded(*losses):
        return after_losses(*losses).exploded

    assert [exploded(*[1.0] * count, *[1.51] * 4) for count in (19, 20)] == [False, True]
    assert not exploded(*[1.0] * 30, *[1.49] * 20)
    assert not exploded(*[1.0] * 30, *[1.51] * 3)
    assert not exploded(*[1.0] * 30, *[1.51] * 4, 1.0)  # it recovered
    assert not exploded(*[1.0] * 10, *[3.0] * 30)  # no level before there are 20 losses


def test_one_loss_above_guessing_is_an_explosion():
    guessing = math.log(272)
    assert not after_losses(guessing + 0.99).exploded
    assert after_losses(guessing + 1.01).exploded
    assert not after_losses(guessing + 1.01, 2.0).exploded


def test_other_validation_data_reset_all_loss_statistics():
    progress = RunProgress(
        recent=[1.0],
        lowest_peak=1.0,
        exploded=True,
        skipped=1,
        unimproved=2,
        best_loss=2.0,
        val_loss=2.0,
    )
    progress.forget_losses(evaluations=True)
    assert progress == RunProgress()


def test_explosion_is_logged_with_its_text_and_again_on_resuming(shards, train_small, new_log):
    def spoil_logits(model):
        model.lm_head.register_forward_hook(lambda *call: call[-1] * 1000)

    flags = "--seed 3 --eval_every 0 --no-engram_reset"
    directory = train_small(flags, steps=36, model=model_with_fault(31, spoil_logits))
    assert final_state(directory)["exploded"]
    first = next(line for line in new_log().splitlines() if "is a spike" in line)
    assert "step 31 " in first
    assert first.endswith(f"data.py show {shards} --seq_len 32 --seed 3 --first 60 --count 2")
    train_small(flags, steps=37)
    assert "the loss had exploded by then" in new_log()


def test_clearing_the_tables_resets_spike_detection():
    """Empty tables raise the loss far above recent losses. An earlier explosion stays recorded."""
    progress = RunProgress()

    def record(loss, cleared=False):
        return progress.record(dict(loss=loss, skipped=False), 0, 0, cleared)

    for _ in range(30):
        assert not record(1.0).spike
    assert record(1.0, cleared=True).cleared
    for loss in [3.6] * 5 + [2.0] * 20:
        assert not record(loss).spike and not progress.exploded
    assert record(5.0).spike
    for _ in range(30):
        record(5.0)
    assert not progress.exploded  # the lowest peak since the clearing is 3.6
    for _ in range(4):
        record(7.0, cleared=True)
    assert progress.exploded and progress.lowest_peak < 7


def test_skipped_step_starts_no_epoch_and_clears_no_tables():
    progress = RunProgress()
    events = progress.record(dict(loss=math.nan, skipped=True), 64, 1, True)
    assert events == StepEvents(spike=False, begins_epoch=False, cleared=False)
    assert (progress.step, progress.epoch, progress.skipped) == (1, 0, 1)
    events = progress.record(dict(loss=1.0, skipped=False), 128, 1, True)
    assert events == StepEvents(spike=False, begins_epoch=True, cleared=True)
    assert (progress.epoch, progress.skipped) == (1, 0)
    progress.record(dict(loss=1.0, skipped=False), 192, 0)  # the data has grown
    assert progress.epoch == 0


# --------------------------------------------------------------------------------------------------
# Patience


def test_patience_ends_the_run_after_evaluations_without_improvement(train_small, losses, new_log):
    """The exit status is 0. A repeated command logs why it trains no step; more patience continues.
    The evaluations at steps 6 and 8 are worse; a run's final evaluation does not count."""
    for steps, last, ended in ((5, 5, False), (7, 7, False), (100, 8, True), (100, 8, True)):
        directory = train_small("--eval_every 2 --patience 2", steps=steps)
        log = new_log()
        assert ("ended by --patience 2" in log) == ended
        assert last_step(directory) == last
    # 2.4 and 2.0 nats
    assert "validation bpb 3.4625, " in log and "the best validation bpb was 2.8854; " in log
    assert "nothing left to train" in log
    # changed settings reset the patience
    for flags, last in (("2 --weight_decay 0.3", 14), ("3", 20)):
        train_small(f"--eval_every 2 --patience {flags}", steps=20)
        assert last_step(directory) == last


def test_best_loss_restarts_when_the_validation_data_change(train_small, losses):
    """On the first data 2.0 at step 4 is best; on the second data 2.4 at step 8, then 2.2 at the
    end. A new learning rate changes no data."""
    flags = "--eval_every 2 --keep_best --keep_last 2"
    train_small(flags, steps=5)
    assert best_checkpoint(train_small(flags, "--lr 0.02", steps=6)).step == 4
    for steps in (8, 9):
        directory = train_small(flags, "--eval_tokens 64", steps=steps)
        assert best_checkpoint(directory).step == steps
        assert final_state(directory)["best_loss"] >= 2.2


def test_nonfinite_validation_loss_is_never_the_best():
    progress = RunProgress(best_loss=2.0)
    progress.record_evaluation(dict(val_loss=math.nan), counts=True)
    assert (progress.val_loss, progress.best_loss, progress.unimproved) == (None, 2.0, 1)
    assert not progress.is_best


# --------------------------------------------------------------------------------------------------
# metrics.jsonl and the log


def test_lines_lost_to_a_full_disk_are_written_later_in_order(tmp_path, new_log):
    machine.start_log()
    with Metrics(tmp_path / "metrics.jsonl", 0) as lines:
        real = lines.file

        def write(pending):
            assert lines.lock.locked()  # the checkpoint thread writes, too
            return real.write(pending[:9])

        nearly_full = SimpleNamespace(write=write)
        for step in range(6):
            full = open("/dev/full", "wb", buffering=0)
            lines.file = full if step in (0, 2, 3, 5) else nearly_full
            lines.write(dict(step=step, loss=math.nan if step % 2 else None))
        with pytest.raises(OSError, match="No space left"):
            lines.sync()  # raises, so that no checkpoint is saved without the lines before it
        lines.file = real
        lines.sync()
    assert real.closed
    assert new_log().count("METRICS NOT WRITTEN") == 3  # once per outage: steps 0, 2 and 5
    assert metrics(tmp_path) == [dict(step=step, loss=None) for step in range(6)]


def test_resumed_run_truncates_metrics_to_its_checkpoint(train_small):
    """A killed run had written lines after its checkpoint; the last line is incomplete."""
    path = train_small("--eval_every 0", steps=3) / "metrics.jsonl"
    lines = path.read_text().replace('"loss": ', '"loss": null, "x": ', 1)
    path.write_text(lines + '{"step": 4, "loss": 7}\n{"step": null}\n{"step": 5, "lo')
    train_small("--eval_every 0", steps=4)
    assert path.read_text().startswith(lines)
    assert [line["step"] for line in metrics(path.parent)] == [1, 2, 3, 4]


def test_speed_and_segment_metrics_match_the_steps(tmp_path, train_small):
    """Words of four letters and a space are segments of five bytes, except at the ends of a window.
    The times of all steps, of 64 bytes each, sum to less than the run took."""
    words = tmp_path / "words"
    words.mkdir()
    for name in ("train.bin", "val.bin"):
        np.frombuffer(b"word " * 200, np.uint8).astype("<u2").tofile(words / name)
    began = time.time()
    flags = f"--set {SMALL},boundaries=words,n_routed_experts=0"
    directory = train_small(flags, "--data_dir", words)
    lines = metrics(directory, clock=True)
    ended = time.time()
    model = Spider(SpiderConfig(**final_state(directory)["cfg"]))
    peak = machine.matmul_rate(torch.device("cpu"))
    assert sum(64 / line["tok_per_sec"] for line in lines) < ended - began
    for line in lines:
        assert began < line["time"] < ended
        assert line["expert_balance"] == 1
        length = line["bytes_per_segment"]
        assert 4 < length < 6
        flops = line["tok_per_sec"] * estimate.flops_per_byte(model, round(length, 1), 2, 32)
        assert line["bf16_mfu"] == pytest.approx(flops / peak)
    assert 4 < lines[-1]["val_bytes_per_segment"] < 6
    assert not any("/" in name for name in lines[-1])  # no source has a name


# --------------------------------------------------------------------------------------------------
# Signals


TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


@pytest.fixture
def handled():
    """Install a caller's handler for all signals that stop a run; return the list of signals it
    receives."""
    numbers = []
    before = [signal.signal(number, lambda number, _: numbers.append(number)) for number in STOPS]
    yield numbers
    for number, handler in zip(STOPS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "ranks, first, second, seconds, quits",
    (
        (1, INT, INT, 2.1, True),
        (2, USR1, TERM, 2.1, True),
        (1, HUP, HUP, 1.9, False),
        (2, TERM, HUP, 1.9, False),
    ),
    ids=str,
)
def test_second_signal_goes_to_the_caller_unless_it_repeats_the_first(
    handled, ranks, first, second, seconds, quits
):
    with StopSignals(ranks) as stop:
        stop.raises = False
        os.kill(os.getpid(), first)
        stop.received -= seconds
        os.kill(os.getpid(), second)
    assert stop.asked == first
    assert stop.agreed == (first if ranks == 1 else None)
    assert handled == ([second] if quits else [])


def test_run_restores_signal_handlers_and_keeps_sighup_ignored(handled):
    """Shells make background jobs ignore SIGINT, too; yet torchrun and kill -INT may stop them."""
    for number in (HUP, INT, USR1):
        signal.signal(number, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in STOPS]
    with StopSignals():
        kept = [number for number in STOPS if signal.getsignal(number) in before]
    assert kept == [USR1, HUP]
    assert [signal.getsignal(number) for number in STOPS] == before


def test_ranks_agree_on_one_signal_by_a_sum_of_votes():
    for received in itertools.product((None, *STOPS), repeat=3):
        ranks = [StopSignals(3) for _ in received]
        for rank, number in zip(ranks, received, strict=True):
            rank.raises = False
            if number is not None:
                rank._ask(number, None)
        votes = sum(rank.vote for rank in ranks)
        for rank in ranks:
            rank.agree(votes)
        expected = [number for number in STOPS if number in received]
        assert [rank.agreed for rank in ranks] == [expected[-1] if expected else None] * 3


# --------------------------------------------------------------------------------------------------
# wandb and the profiler

OFFLINE = dict(WANDB_MODE="offline", WANDB__SERVICE_WAIT="300")


OPEN_RUN = """
import sys, train, wandb
mine = wandb.init(project="mine")
for steps in ("1", "2"):
    assert train.command_line([*sys.argv[1:], "--max_steps", steps]) == 0
assert wandb.run is mine
mine.log(dict(a=1))
assert mine.summary["a"] == 1
assert "loss" not in mine.summary.keys()
"""


@pytest.mark.slow
def test_wandb_resumes_offline_next_to_the_callers_open_run(tmp_path, argv_of):
    done = run_python(OPEN_RUN, *argv_of("--eval_every 0 --run smoke"), cwd=tmp_path, **OFFLINE)
    assert done.returncode == 0, done.stderr
    ids = {path.name.rpartition("-")[2] for path in tmp_path.glob("wandb/offline-run-*")}
    assert len(ids) == 2


class FakeWandb:
    """Stand in for the module and its runs."""

    def __init__(self):
        self.begun = []  # project and id of each run, None for a new one
        self.calls = []  # logged steps and "finish"
        self.fails_at = None  # the call that fails

    def init(self, project, id, **_):
        self.begun.append((project, id))
        self.id = id or f"new{len(self.begun)}"
        return self

    def log(self, metrics, step):
        self.calls.append(step)
        if step == self.fails_at:
            raise BrokenPipeError("the service is gone")

    def finish(self):
        self.log({}, "finish")


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_run_resumes_only_in_its_directory_and_under_its_name(
    train_small, wandb, monkeypatch
):
    """A checkpoint resumed in another directory, or a new name, starts a new wandb run; without a
    name there is none. WANDB_PROJECT may name the project."""
    flags = "--run a --eval_every 0"
    monkeypatch.setenv("WANDB_PROJECT", "")
    first = train_small(flags, steps=2)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    train_small(flags, steps=3)  # resumes the same wandb run
    train_small(f"--eval_every 0 --resume {first}/spider-step2.pt", steps=3, ckpt="other")
    train_small(flags, steps=4, ckpt="other")
    for _ in range(2):  # the second command has no step left
        train_small(flags, "--run b", steps=5, ckpt="other")
    assert wandb.begun == [("spider", None), ("mine", "new1"), ("mine", None), ("mine", None)]
    assert wandb.calls == [1, 2, "finish", 3, "finish", 4, "finish", 5, "finish"]


def test_wandb_failure_is_logged_and_the_run_continues(train_small, wandb, new_log):
    for steps, fails_at in ((2, 1), (4, "finish")):
        wandb.fails_at = fails_at
        directory = train_small("--run a --eval_every 0", steps=steps)
        assert len(metrics(directory)) == steps
        assert new_log().count("wandb failed: BrokenPipeError: the service is gone") == 1
    assert wandb.calls == [1, 3, 4, "finish"]


def test_profiler_writes_a_trace_of_three_steps(tmp_path, argv_of, run_on):
    run_on(1, argv_of("--eval_every 0 --profile", steps=11))
    steps = re.findall(r"ProfilerStep#([0-9]+)", (tmp_path / "run" / "trace.json").read_text())
    assert {*steps} == {"2", "3", "4"}  # counted from 0
