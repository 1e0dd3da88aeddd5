"""A run in progress: spikes told from noise, patience, metrics.jsonl, the log, wandb, the
profiler."""

import itertools
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import train
from conftest import SMALL, final_state, metrics, refused, run, run_flags
from jobs import Job, forked
from spider import machine
from spider.checkpoint import best_checkpoint
from spider.run import STOPS, Metrics, RunProgress, StepEvents, StopSignals, Tracker

# --------------------------------------------------------------------------------------------------
# Spikes and explosions


def test_noise_is_no_spike_and_a_real_explosion_is_marked():
    progress, noise = RunProgress(), np.random.default_rng(0)
    for _ in range(200):
        assert not progress.watch(2 + 0.1 * noise.normal()) and not progress.exploded
    assert progress.watch(2.9) and not progress.exploded
    assert [progress.exploded for loss in (4.5, 4.6, 4.7, 4.8) if progress.watch(loss) or True] == [
        False
    ] * 3 + [True]
    progress.watch(2.0)
    assert not progress.exploded  # it recovered
    progress.watch(7.0)  # worse than guessing among all ids
    assert progress.exploded
    progress.forget_losses(evaluations=False)
    assert not any(progress.watch(loss) for loss in [0.3] * 10 + [4.0]) and not progress.exploded
    for loss in [0.3, 0.4, 4.0, 0.3] * 30:  # documents that are unlike each other
        assert not progress.watch(loss) and not progress.exploded


def test_a_loss_is_judged_by_the_largest_of_the_last_64_once_there_are_20():
    def spike_after(*losses):
        progress = RunProgress()
        assert not any(progress.watch(loss) for loss in losses[:-1])
        return progress.watch(losses[-1])

    for count in (19, 20):
        assert spike_after(*[1.0] * count, 1.21) == (count == 20)
    assert not spike_after(*[1.0] * 20, 1.19)
    for count in (63, 64):
        assert spike_after(2.0, *[1.0] * count, 2.3) == (count == 64)


def test_a_run_explodes_above_its_lowest_level_or_that_of_guessing():
    def exploded_after(*losses):
        progress = RunProgress()
        for loss in losses:
            progress.watch(loss)
        return progress.exploded

    assert not exploded_after(*[1.0] * 10, *[3.0] * 30)  # no level before there are 20 losses
    assert not exploded_after(*[1.0] * 30, *[1.49] * 20) and not exploded_after(
        *[1.0] * 30, *[1.6] * 3
    )
    for count in (19, 20):
        assert exploded_after(*[1.0] * count, *[1.51] * 4) == (count == 20)
    guessing = math.log(272)
    assert not exploded_after(guessing + 0.99) and exploded_after(guessing + 1.01)


def test_what_a_run_forgets_of_its_losses():
    def progress():
        return RunProgress(
            recent=[1.0], lowest_peak=1.0, exploded=True, unimproved=2, best_loss=2.0, val_loss=2.0
        )

    for forgets, remains in (
        (RunProgress.forget_recent, (2, 2.0, 2.0)),
        (lambda progress: progress.forget_losses(evaluations=False), (0, 2.0, 2.0)),
        (lambda progress: progress.forget_losses(evaluations=True), (0, math.inf, None)),
    ):
        changed = progress()
        forgets(changed)
        assert (changed.recent, changed.lowest_peak, changed.exploded) == ([], math.inf, False)
        assert (changed.unimproved, changed.best_loss, changed.val_loss) == remains


def test_a_run_that_explodes_is_marked_and_says_so_when_it_resumes(
    tmp_path, shards, monkeypatch, capsys
):
    update, steps = train.update, itertools.count(1)

    def exploding(*args, **options):
        numbers = update(*args, **options)
        return numbers | dict(loss=numbers["loss"] + 6.0 * (next(steps) > 30))

    monkeypatch.setattr(train, "update", exploding)
    flags = ("--seed", "3", "--eval_every", "0", "--no-engram_reset")
    directory = run(tmp_path, shards, *flags, steps=36)
    assert final_state(directory)["exploded"]
    first = next(line for line in capsys.readouterr().err.splitlines() if "is a spike" in line)
    assert "step 31 " in first
    assert first.endswith(f"data.py show {shards} --seq_len 32 --seed 3 --first 60 --count 2")
    run(tmp_path, shards, *flags, steps=36)
    assert "the loss had exploded by then" in capsys.readouterr().err


def test_losses_after_the_tables_were_cleared_are_judged_afresh():
    """Empty tables raise the loss far above the recent ones. An explosion before stays one."""

    def record(loss, cleared=False):
        return progress.record(dict(loss=loss, skipped=False), 0, 0, cleared)

    progress = RunProgress()
    for loss in [1.0] * 30:
        assert not record(loss).spike
    assert record(1.0, cleared=True).cleared
    assert not any(record(loss).spike or progress.exploded for loss in [3.6] * 5 + [2.0] * 20)
    assert record(5.0).spike and not progress.exploded
    for loss in [5.0] * 30:
        record(loss)
    assert not progress.exploded  # since then the lowest peak is 3.6
    for loss in [7.0] * 4:
        record(loss, cleared=True)
    assert progress.exploded and progress.lowest_peak < 7


def test_a_skipped_step_begins_no_epoch_and_clears_nothing():
    progress = RunProgress()
    assert progress.record(dict(loss=math.nan, skipped=True), 64, 1, True) == (False, False, False)
    assert (progress.step, progress.epoch, progress.skipped) == (1, 0, 1)
    events = progress.record(dict(loss=1.0, skipped=False), 128, 1, True)
    assert events == StepEvents(spike=False, begins_epoch=True, cleared=True)
    assert (progress.epoch, progress.skipped) == (1, 0)


def test_the_log_names_each_epoch_that_begins_and_whether_the_tables_were_cleared(
    tmp_path, shards, capsys
):
    """Sequences 20 and 40 begin one, in steps 11 and 21; of the third less than half is read."""
    run(
        tmp_path, shards, "--engram_reset", "--target_tokens", "1500", "--eval_every", "0", steps=24
    )
    lines = [
        line.partition(" ")[2]
        for line in capsys.readouterr().err.splitlines()
        if "begins epoch" in line
    ]
    assert [line.partition(" (")[0] for line in lines] == [
        "step 11 begins epoch 1",
        "step 21 begins epoch 2",
    ]
    assert ["Engram tables are empty" in line for line in lines] == [True, False]


# --------------------------------------------------------------------------------------------------
# Patience


def test_a_run_ends_when_its_validation_has_not_improved_in_so_many_evaluations(
    tmp_path, shards, losses, capsys
):
    """Status 0; the same command again says why it trains no further, more patience continues."""
    flags = ("--eval_every", "2", "--patience", "2")
    for steps in (5, 7, 100, 100):
        # 2.5 and 2.4 at steps 6 and 8; the evaluation at an end does not count
        directory = run(tmp_path, shards, *flags, steps=steps)
        assert ("ended by --patience 2" in capsys.readouterr().err) == (steps > 7)
        assert final_state(directory)["step"] == min(steps, 8)
    for patience, end in (("3", 16), ("0", 20)):
        run(tmp_path, shards, "--eval_every", "2", "--patience", patience, steps=20)
        assert final_state(directory)["step"] == end


def test_a_run_whose_settings_change_has_its_patience_back(tmp_path, shards, losses):
    flags = ("--eval_every", "2", "--patience", "2")
    run(tmp_path, shards, *flags, steps=100)
    assert (
        final_state(run(tmp_path, shards, *flags, "--weight_decay", "0.3", steps=100))["step"] == 14
    )


def test_evaluations_of_other_data_are_not_compared_with_earlier_ones(tmp_path, shards, losses):
    """2.0 at step 4 is the best of the first evaluations, 2.4 at step 8 of the others."""
    flags = ("--eval_every", "2", "--keep_best", "--keep_last", "2")
    assert best_checkpoint(run(tmp_path, shards, *flags, steps=6)).step == 4
    for steps in (8, 9):
        directory = run(tmp_path, shards, *flags, "--eval_tokens", "64", steps=steps)
        assert (
            best_checkpoint(directory).step == 8 + (steps > 8)
            and final_state(directory)["best_loss"] >= 2.2
        )


@pytest.mark.parametrize("flag", (("--keep_best",), ("--patience", "3")))
def test_flags_that_need_the_validation_loss_are_refused_without_evaluation(
    tmp_path, shards, capsys, flag
):
    line = refused(run_flags(shards, tmp_path / "run", "--eval_every", "0", *flag), capsys)
    assert f"{flag[0]} needs the validation loss" in line


def test_a_validation_loss_that_is_not_finite_is_not_the_best():
    progress = RunProgress(best_loss=2.0)
    progress.record_evaluation(math.nan, counts=True)
    assert (progress.val_loss, progress.best_loss, progress.unimproved, progress.is_best) == (
        None,
        2.0,
        1,
        False,
    )


def test_only_regular_evaluations_count_for_patience():
    progress = RunProgress(best_loss=2.0)
    for loss, counts, unimproved in (
        (2.5, False, 0),
        (2.0, True, 1),
        (2.0, False, 1),
        (1.9, True, 0),
    ):
        progress.record_evaluation(loss, counts)
        assert progress.unimproved == unimproved


# --------------------------------------------------------------------------------------------------
# metrics.jsonl and the log


def test_lines_that_a_full_disk_refuses_are_written_later_in_order(tmp_path, capsys):
    machine.start_log()
    with Metrics(tmp_path / "metrics.jsonl", 0) as lines:
        real = lines.file
        for step in range(6):
            lines.file = open("/dev/full", "wb", buffering=0) if step in (0, 2, 3, 5) else real
            lines.write(dict(step=step, loss=math.nan if step % 2 else None))
        with pytest.raises(OSError, match="No space left"):
            # so that no checkpoint is newer than the lines before it
            lines.sync()
        lines.file = real
        lines.sync()
    # from steps 0, 2 and 5 on
    assert real.closed and capsys.readouterr().err.count("METRICS NOT WRITTEN") == 3
    assert metrics(tmp_path) == [dict(step=step, loss=None) for step in range(6)]


def test_a_resumed_run_repairs_the_lines_of_an_interrupted_or_foreign_writer(tmp_path, shards):
    """A line cut short by a kill, numbers that are not JSON, steps that are no steps, nesting
    without end."""
    directory = run(tmp_path, shards, "--eval_every", "0", steps=3)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    lines[0] = lines[0].replace(
        '"step": 1,', '"step": 1, "a": NaN, "b": Infinity, "c": "fast", "d": 1e999,'
    )
    (directory / "metrics.jsonl").write_text(
        "\n".join(
            [
                *lines,
                '{"step": Infinity}',
                "7",
                "\xff",
                "[" * 100_000,
                '{"step": -1}',
                '{"step": 1%s}' % ("0" * 400),
                '{"step": 2, "lo',
            ]
        )
    )
    run(tmp_path, shards, "--eval_every", "0", steps=4)
    found = metrics(directory)
    assert [line["step"] for line in found] == [1, 2, 3, 4] and found[0]["loss"] > 1
    assert not found[0].keys() & {"a", "b", "c", "d"} or not any(
        found[0].get(name) for name in "abcd"
    )
    assert not any(
        word in (directory / "metrics.jsonl").read_text() for word in ("NaN", "Infinity")
    )


def test_metrics_that_are_no_file_are_an_error_and_a_link_is_not_written_through(
    tmp_path, shards, capsys
):
    directory, precious = run(tmp_path, shards, steps=1), tmp_path / "precious"
    precious.write_text('{"step": 0}\n')
    (directory / "metrics.jsonl").unlink()
    os.mkfifo(directory / "metrics.jsonl")
    assert "metrics.jsonl: not a regular file: use another name" in refused(
        run_flags(shards, directory), capsys
    )
    (directory / "metrics.jsonl").unlink()
    (directory / "metrics.jsonl").symlink_to(precious)
    run(tmp_path, shards, steps=2)
    assert (
        precious.read_text() == '{"step": 0}\n' and not (directory / "metrics.jsonl").is_symlink()
    )


def test_the_log_has_the_lines_of_log_every_and_metrics_every_step(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--log_every", "4", "--eval_every", "0", steps=10)
    lines = capsys.readouterr().err.splitlines()
    logged = [line for line in lines if "| loss " in line]
    assert [int(line.partition("step ")[2].partition("/")[0]) for line in logged] == [1, 4, 8, 10]
    assert [line["step"] for line in metrics(directory)] == [*range(1, 11)]
    assert any(f"next: python sample.py {directory}" in line for line in lines)


def test_metrics_of_speed_and_segments_are_those_of_the_steps(tmp_path):
    """Words of four letters, and their spaces, are segments of five bytes but for the ends of a
    window. The rates of 64 bytes add up to no more time than the run took."""
    (tmp_path / "data").mkdir()
    for name in ("train.bin", "val.bin"):
        np.frombuffer(b"word " * 200, np.uint8).astype("<u2").tofile(tmp_path / "data" / name)
    began = time.time()
    directory = run(
        tmp_path, tmp_path / "data", "--set", f"{SMALL},boundaries=words,n_routed_experts=0"
    )
    ended = time.time()
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert sum(64 / line["tok_per_sec"] for line in lines) < ended - began
    assert all(began < line["time"] < ended and line["expert_balance"] == 1 for line in lines)
    assert all(4 < line["bytes_per_segment"] < 6 for line in lines)
    assert 4 < lines[-1]["val_bytes_per_segment"] < 6 and not any("/" in name for name in lines[-1])
    assert (
        lines[-1]["val_bpb"] == pytest.approx(lines[-1]["val_loss"] / math.log(2))
        and 0 < lines[-1]["val_loss"] < 6
    )


def test_by_default_a_run_logs_about_a_hundred_lines_and_one_a_minute(
    tmp_path, shards, monkeypatch, capsys
):
    def steps_logged(steps):
        argv = run_flags(shards, tmp_path / "run", "--eval_every", "0", steps=steps)
        place = argv.index("--log_every")
        assert train.command_line(argv[:place] + argv[place + 2 :]) == 0
        lines = capsys.readouterr().err.splitlines()
        return [
            int(line.partition("step ")[2].partition("/")[0]) for line in lines if "| loss " in line
        ]

    assert (train.LOG_LINES, train.LOG_SECONDS) == (100, 60)
    monkeypatch.setattr(train, "LOG_LINES", 6)
    assert steps_logged(6) == [1, 2, 3, 4, 5, 6]
    assert steps_logged(13) == [7, 9, 12, 13]  # every third
    monkeypatch.setattr(train, "LOG_SECONDS", 0.0)
    assert steps_logged(15) == [14, 15]


def test_the_log_says_once_what_its_columns_mean_and_has_those_that_vary(tmp_path, shards, capsys):
    for flags, varies in (
        (("--n_loops", "2"), True),
        (("--n_loops", "1"), False),
        (("--n_loops", "1", "--random_loops"), True),
        (("--set", f"{SMALL},act=false"), False),
    ):
        run(tmp_path, shards, *flags, "--eval_every", "0", steps=2, ckpt="".join(flags)[:40])
        lines = capsys.readouterr().err.splitlines()
        (meanings,) = [line for line in lines if "columns of a step" in line]
        assert ("loops (" in meanings) == varies and "balance (" in meanings
        for line in (line for line in lines if "| loss " in line):
            assert (" loops |" in line) == varies and " balance " in line
            assert line.count(" | ") == meanings.count(" (")


def test_every_line_of_a_run_is_printable_whatever_its_files_are_called(tmp_path, shards, capsys):
    name = "a\x1b[2J\r\n99:99:99 forged \u202e\udcff"
    directory = run(tmp_path, shards, "--sample_every", "9", ckpt=name, steps=2)
    assert train.command_line(run_flags(shards, directory, "--dry_run")) == 0
    (directory / "spider-step2.pt").write_bytes(b"no checkpoint")
    assert train.command_line(run_flags(shards, directory)) == 2
    lines = [line for part in capsys.readouterr() for line in part.split("\n")]
    assert sum("99:99:99 forged" in line for line in lines) > 3
    assert any("next: python sample.py '" in line for line in lines)
    assert not any(line.startswith("99:99:99") or not line.isprintable() for line in lines)


# --------------------------------------------------------------------------------------------------
# Signals


def test_one_rank_agrees_to_stop_at_once_and_several_by_their_votes():
    for ranks in (1, 2):
        with StopSignals(ranks) as stop:
            stop.raises = False
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.votes() == [1.0, 0.0, 0.0, 0.0]
            assert stop.agreed == (signal.SIGTERM if ranks == 1 else None)
            stop.agree([0.0, 0.0, 0.0, 0.0])
            assert stop.agreed == (signal.SIGTERM if ranks == 1 else None)
            stop.agree([0.0, 3.0, 0.0, 0.0])
            assert stop.agreed == signal.SIGINT


def receive(ranks: int, numbers: list[int], seconds: float, ignored: tuple[int, ...] = ()):
    """Receive signals, so many seconds apart, in a process of its own; exit with the one that stops
    the run."""
    now = iter(range(100))
    time.monotonic = lambda: next(now) * seconds
    for number in (TERM, INT, HUP, USR1):  # nohup starts pytest with some ignored
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    with StopSignals(ranks) as stop:
        stop.raises = False
        for number in numbers:
            os.kill(os.getpid(), number)
    sys.exit(int(stop.asked or 0))


TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


@pytest.mark.parametrize(
    "ranks, numbers, seconds, status",
    (
        (1, [HUP], 0, HUP),
        (1, [USR1], 0, USR1),
        (1, [TERM, TERM], 0, -TERM),
        (1, [INT, INT], 9, -INT),
        (1, [HUP, HUP], 9, HUP),
        (1, [USR1, USR1], 9, USR1),  # a terminal's end may send SIGHUP twice
        (1, [TERM, HUP], 9, TERM),
        (1, [USR1, TERM], 9, USR1),  # as systemd and Slurm send them
        (1, [USR1, TERM, TERM], 9, -TERM),
        (2, [TERM, TERM], 4.9, TERM),
        (2, [TERM, TERM], 5.1, -TERM),
    ),
    ids=str,
)
def test_a_repeated_ctrl_c_or_sigterm_quits_and_no_other_signal_does(
    processes, ranks, numbers, seconds, status
):
    """With several ranks, not within the five seconds in which torchrun repeats it."""
    child = processes.Process(target=receive, args=(ranks, numbers, seconds))
    child.start()
    child.join()
    assert child.exitcode == status


@pytest.mark.parametrize("numbers, status", (([HUP, USR1], 0), ([INT], INT)), ids=str)
def test_signals_that_nohup_ignores_stay_ignored_but_not_ctrl_c(processes, numbers, status):
    """A shell ignores it for a background job, which torchrun and kill -INT may stop all the
    same."""
    child = processes.Process(target=receive, args=(1, numbers, 0, numbers))
    child.start()
    child.join()
    assert child.exitcode == status


def test_handlers_of_signals_are_restored():
    before = [signal.getsignal(number) for number in STOPS]
    with StopSignals():
        assert [signal.getsignal(number) for number in STOPS] != before
    assert [signal.getsignal(number) for number in STOPS] == before


# --------------------------------------------------------------------------------------------------
# wandb and the profiler


@pytest.mark.slow
def test_wandb_is_used_only_with_a_run_name_works_offline_and_resumes_its_run(
    tmp_path, shards, processes
):
    for steps, flags in enumerate(((), ("--run", "smoke"), ("--run", "smoke")), 1):
        assert (tmp_path / "wandb").exists() == (steps > 2)
        argv = run_flags(shards, tmp_path / "run", "--eval_every", "0", *flags, steps=steps)
        status, _, log = forked(
            processes, tmp_path, *argv, WANDB_MODE="offline", WANDB__SERVICE_WAIT="300"
        )
        assert status == 0, log
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"), key=os.path.getmtime)
    first, again = (path.name.rpartition("-")[2] for path in runs)
    assert first == again


class FakeWandb:
    """Stands for the module, and for its runs."""

    def __init__(self):
        self.ids, self.calls = [], []

    def init(self, id, **_):
        self.ids.append(id)
        self.id = id or f"new{len(self.ids)}"
        return self

    def log(self, metrics, step):
        self.calls.append(step)

    def finish(self):
        self.calls.append("finish")


def test_going_back_in_another_directory_begins_a_new_wandb_run(tmp_path, shards, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    flags = ("--run", "a", "--eval_every", "0")
    first = run(tmp_path, shards, *flags, steps=2)
    run(tmp_path, shards, *flags, steps=3)  # resumes: the same
    back = ("--resume", str(first / "spider-step2.pt"))
    run(tmp_path, shards, *back, "--eval_every", "0", steps=3, ckpt="other")
    run(tmp_path, shards, *flags, *back, steps=4, ckpt="other")
    run(tmp_path, shards, *flags, *back, steps=5, ckpt="other")
    run(tmp_path, shards, "--run", "b", "--eval_every", "0", steps=6, ckpt="other")
    assert fake.ids == [None, "new1", None, "new3", None] and fake.calls.count("finish") == 5


def test_a_failure_of_wandb_is_a_line_and_the_run_goes_on_without_it(
    tmp_path, shards, monkeypatch, capsys
):
    fake = FakeWandb()

    def log(metrics, step):
        if step == 3:
            raise BrokenPipeError("the service is gone")
        fake.calls.append(step)

    fake.log = log
    monkeypatch.setitem(sys.modules, "wandb", fake)
    directory = run(tmp_path, shards, "--run", "a", "--eval_every", "0", steps=6)
    assert (
        fake.calls == [1, 2]
        and len(metrics(directory)) == 6
        and final_state(directory)["step"] == 6
    )
    lines = capsys.readouterr().err
    assert lines.count("the service is gone") == lines.count("wandb failed") == 1


def test_wandb_that_fails_at_the_end_fails_no_run(capsys):
    fake = FakeWandb()
    fake.finish = lambda: (_ for _ in ()).throw(RuntimeError("no network"))
    machine.start_log()
    Tracker(fake).finish()
    assert "no network" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_survives_the_death_of_wandbs_service(tmp_path, shards, processes):
    """kill -9, as the kernel does where memory is short."""
    argv = run_flags(
        shards,
        tmp_path / "run",
        "--eval_every",
        "0",
        "--run",
        "smoke",
        "--ckpt_every",
        "5",
        steps=400,
    )
    job = Job(processes, tmp_path, 1, argv, WANDB_MODE="offline", WANDB__SERVICE_WAIT="300")
    job.wait_for("step 4/")
    children = (
        Path(f"/proc/{job.ranks[0].pid}/task/{job.ranks[0].pid}/children").read_text().split()
    )
    assert children
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    (status,), log = job.end()
    assert status == 0 and log.count("wandb failed") == 1 and "Traceback" not in log, log
    assert final_state(tmp_path / "run")["step"] == len(metrics(tmp_path / "run")) == 400


def test_the_profiler_leaves_a_trace(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--eval_every", "0", "--profile")
    status, _, log = forked(processes, tmp_path, *argv)
    assert status == 0, log
    steps = re.findall(r"ProfilerStep#([0-9]+)", (tmp_path / "run" / "trace.json").read_text())
    assert {*steps} == {"2", "3", "4"}  # counted from 0
