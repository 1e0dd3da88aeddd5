"""Resume runs that were killed, stopped or changed: bitwise equality, the resume rule, the log."""

import errno
import math
import os
import random
import shutil
import signal
import time
import weakref
from contextlib import suppress

import pytest
import torch

import train
from conftest import (
    SMALL,
    STOPPED,
    assert_same,
    assert_same_runs,
    contents,
    final_state,
    has_fp8,
    last_step,
    metrics,
    model_with_fault,
    saved_steps,
    signal_in_step,
)
from jobs import Job, sleeps, steps_done, unread, until
from spider.errors import DataError, Stopped
from spider.model import boundaries
from spider.training import checkpoint
from spider.training.checkpoint import load_start
from spider.training.run import COPY_SECONDS, RunProgress

# --------------------------------------------------------------------------------------------------
# Bitwise equality

RESUMED_FLAGS = (
    "--precision fp8 --fp8_experts",
    "--optimizer adamw8bit --grad_accum 2",
    "--engram_reset --dropout 0.3 --random_loops --sample_every 9",
    f"--set {SMALL},boundaries=learned,segment_offsets=3,core_loss_weight=0.2",
)


@pytest.mark.parametrize("flags", RESUMED_FLAGS, ids=lambda flags: flags.replace(SMALL, ""))
def test_resumed_run_is_bitwise_equal(train_small, train_in_parts, monkeypatch, flags):
    """24 steps of two sequences reach the third epoch (20 sequences each). The run stops once in
    each of the first two epochs; at step 14 an evaluation is due, which the resumed run does."""
    monkeypatch.setattr(boundaries, "TRUST_BEGINS", 2)
    monkeypatch.setattr(boundaries, "TRUST_COMPLETE", 5)
    whole = train_small("--eval_every 7", flags, steps=24, ckpt="whole")
    parts = train_in_parts("--eval_every 7", flags, steps=24, cuts=(5, 14))
    assert_same_runs(whole, parts)
    assert final_state(whole)["epoch"] >= 2


def test_run_resumes_from_a_stop_at_any_step(train_small, train_in_parts):
    """This includes the last step, before the final evaluation."""
    whole = train_small("--ckpt_every 3", steps=7, ckpt="whole")
    assert_same_runs(whole, train_in_parts("--ckpt_every 3", steps=7, cuts=range(1, 8)))


@pytest.mark.parametrize("steps_by_batch", ({3: 7, 1: 9}, {2: 11, 4: 13}), ids=str)
def test_epoch_starts_once_even_if_the_batch_size_changes(train_small, new_log, steps_by_batch):
    """Sequence 20 starts the second epoch; no run reaches the third."""
    for micro_batch, steps in steps_by_batch.items():
        train_small(f"--engram_reset --eval_every 0 --micro_batch {micro_batch}", steps=steps)
    log = new_log()
    assert log.count("begins epoch 1") == log.count("tables cleared: the loss rises") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ("", "--precision fp8", "--moe_backend grouped"))
def test_deterministic_run_resumes_bitwise_on_a_gpu(train_small, train_in_parts, flags):
    if "fp8" in flags and not has_fp8():
        pytest.skip("this GPU has no FP8")
    flags += " --device cuda --deterministic --dropout 0.3"
    whole = train_small(flags, steps=20, ckpt="whole")
    assert_same_runs(whole, train_in_parts(flags, steps=20, cuts=(7,)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_flags_and_stops_resume_bitwise(train_small, train_in_parts, seed):
    """Draw from all flags that change the arithmetic, the data or the loop; stop three times."""
    generator = random.Random(seed)
    choices = (
        "--random_loops",
        "--grad_accum 3",
        "--recompute core",
        "--deterministic",
        "--engram_reset",
        "--schedule wsd --target_tokens 900",
        "--seed 5",
        "--micro_batch 3",
        "--eval_every 3",
        "--ckpt_every 7",
        "--sample_every 5",
        "--moe_backend loop",
        "--dropout 0.3",
    )
    flags = [choice for choice in choices if generator.random() < 0.4]
    flags.append(f"--optimizer {generator.choice(('adamw', 'adamw8bit', 'muon'))}")
    flags.append(f"--precision {generator.choice(('fp32', 'bf16', 'fp8'))}")
    steps = generator.randint(20, 40)
    cuts = sorted(generator.sample(range(1, steps), 3))
    whole = train_small(*flags, steps=steps, ckpt="whole")
    assert_same_runs(whole, train_in_parts(*flags, steps=steps, cuts=cuts))


# --------------------------------------------------------------------------------------------------
# Kills and signals


@pytest.fixture
def start_job(processes, tmp_path, argv_of):
    """Start an endless run of a small model in its own process. `slow` names a function of
    train.py, which then takes an hour."""

    def start(*flags, slow="", faults=(), **environ) -> Job:
        argv = argv_of(*flags, steps=100_000)
        if slow:
            faults = [(sleeps, 0, slow)]
        job = Job(processes, tmp_path, 1, argv, faults=faults, **environ)
        if slow:
            job.wait_for("SLEEPS")
        return job

    return start


def end_by(job: Job, number: int = signal.SIGTERM) -> tuple[int, str]:
    """End a job with a signal; return the job's status and the last line of its log."""
    os.kill(job.ranks[0].pid, number)
    (status,), log = job.end()
    return status, log.splitlines()[-1]


def is_saving(directory) -> bool:
    return any(directory.glob(".spider-step*"))


def pause_while_saving(process, directory):
    """Pause a process while it writes a checkpoint, so that the test can kill it there."""
    while process.is_alive():
        if is_saving(directory):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.01)
            if is_saving(directory):
                return
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.0005)


@pytest.mark.parametrize("kills", (4, pytest.param(50, marks=pytest.mark.slow)))
def test_repeatedly_killed_run_is_bitwise_equal(tmp_path, train_small, start_job, kills):
    """Send SIGKILL at random moments, every other time during a save; repeat the same command."""
    directory = tmp_path / "run"
    flags = "--ckpt_every 2 --no_gradient_checkpointing --eval_every 50"
    kills_while_saving = 0
    for kill in range(kills):
        job = start_job(flags)
        (process,) = job.ranks
        process.join(random.uniform(0.2, 1.2))
        if kill % 2:
            pause_while_saving(process, directory)
        assert process.is_alive(), job.log_so_far()
        process.kill()
        job.end()
        kills_while_saving += is_saving(directory)
    steps = max(saved_steps(directory), default=0) + 5
    train_small(flags, steps=steps)
    assert_same_runs(train_small(flags, steps=steps, ckpt="whole"), directory)
    assert not is_saving(directory)
    assert kills_while_saving >= kills // 4


@pytest.mark.parametrize(
    "slow, number",
    (
        ("", signal.SIGUSR1),
        ("evaluate", signal.SIGINT),
        ("log_sample", signal.SIGTERM),
    ),
)
def test_signal_saves_after_the_step_and_stops(tmp_path, train_small, start_job, slow, number):
    """A signal ends a running evaluation or sample immediately."""
    flags = "--eval_every 7"
    if slow == "log_sample":
        flags += " --sample_every 7"
    job = start_job(flags, slow=slow)
    if not slow:
        job.wait_for("step 5/")
    status, last_line = end_by(job, number)
    assert status == 128 + number
    assert last_line.startswith(f"train.py: {number.name}: stopped after step")
    step = last_step(tmp_path / "run")
    assert step == 7 if slow else step >= 5
    resumed = train_small(flags, steps=step + 2)
    assert_same_runs(train_small(flags, steps=step + 2, ckpt="whole"), resumed)


def test_evaluation_and_sample_after_a_signal_wait_for_the_resumed_run(
    train_small, error_of, new_log
):
    """Between SIGTERM and SIGKILL there may be time only for saving."""
    with signal_in_step(4):
        directory = train_small("--sample_every 4", status=STOPPED)
    state = final_state(directory)
    assert (state["step"], state["val_loss"]) == (4, None)
    log = new_log()
    assert "evaluating" not in log and "continues" not in log
    assert "val_bpb" not in metrics(directory)[-1]
    assert "settings differ: lr was" in error_of("--lr 0.5", steps=4)
    train_small("--sample_every 4", steps=4)
    assert final_state(directory)["val_loss"] > 0
    assert "step 4 continues" in new_log()


def test_signal_before_the_first_step_stops_and_writes_nothing(train_small, start_job):
    directory = train_small("--precision fp8", steps=2)
    before = contents(directory)
    status, last_line = end_by(start_job("--precision fp8", slow="warm_up"))
    assert status == STOPPED and "before the first step" in last_line
    assert contents(directory) == before


def test_signal_does_not_interrupt_record_evaluation(train_small, monkeypatch):
    record = RunProgress.record_evaluation

    def stop_and_record(progress, numbers, counts):
        os.kill(os.getpid(), signal.SIGTERM)
        record(progress, numbers, counts)

    monkeypatch.setattr(RunProgress, "record_evaluation", stop_and_record)
    state = final_state(train_small("--eval_every 2", status=STOPPED))
    assert state["step"] == 2
    assert state["best_loss"] == state["val_loss"] == state["metrics"]["val_loss"]


def test_second_signal_kills_the_process(start_job):
    job = start_job(slow="accumulate")
    job.ranks[0].terminate()
    job.wait_for("repeat to quit at once")
    time.sleep(COPY_SECONDS)
    assert end_by(job)[0] == -signal.SIGTERM


def test_signal_saves_even_if_nobody_reads_stderr(tmp_path, start_job):
    job = start_job(faults=[(unread, 0, None)])
    until(lambda: steps_done(tmp_path / "run") > 5)
    os.kill(job.ranks[0].pid, signal.SIGTERM)
    assert job.end()[0] == [STOPPED]
    assert last_step(tmp_path / "run") > 5


def test_last_step_is_saved_before_the_final_evaluation(tmp_path, train_small, start_job):
    """The same command, repeated, does the evaluation."""
    flags = "--eval_every 50"
    directory = tmp_path / "run"
    job = start_job(flags, "--max_steps 3", slow="evaluate")
    until(lambda: saved_steps(directory) == [3])
    assert end_by(job, signal.SIGKILL)[0] == -signal.SIGKILL
    assert final_state(directory)["val_loss"] is None
    resumed = train_small(flags, steps=3)
    assert_same_runs(train_small(flags, steps=3, ckpt="whole"), resumed)
    assert final_state(resumed)["val_loss"] > 0


@pytest.mark.parametrize(
    ("flags", "evaluates"), [("--eval_every 50", True), ("--eval_every 0", False)]
)
def test_everything_is_saved_before_the_final_sample(
    tmp_path, train_small, start_job, flags, evaluates
):
    job = start_job(flags, "--max_steps 3", slow="log_sample")
    directory = tmp_path / "run"
    whole = train_small(flags, steps=3, ckpt="whole")

    def is_saved() -> bool:
        steps = saved_steps(directory)
        return steps == [3] and (final_state(directory)["val_loss"] is not None) == evaluates

    until(is_saved)
    assert end_by(job, signal.SIGKILL)[0] == -signal.SIGKILL
    assert_same_runs(whole, directory)


def test_full_disk_is_logged_and_loses_no_saved_step(train_small, monkeypatch, new_log, error_of):
    """Neither step 4 nor the evaluation of the last step is saved; older checkpoints stay. They
    also stay if the process is killed while it rewrites the last checkpoint."""
    flags = "--ckpt_every 2 --keep_best --eval_every 2"
    write = checkpoint.write_archive

    def write_few_evaluations(file, saved):
        if saved["step"] > 2 and saved["val_loss"] is not None:
            file.write(b"a part of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, saved)

    whole = train_small(flags, steps=5, ckpt="whole")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_archive", write_few_evaluations)
        train_small(flags, steps=5, status=2)
        assert new_log().count("No space left on device") == 2
        assert "step 5 could not be saved" in error_of(flags, steps=5)
    directory = train_small(flags, steps=5)
    assert_same_runs(whole, directory)
    assert saved_steps(directory) == [2, 5]


@pytest.mark.slow
def test_signal_interrupts_compilation(tmp_path, start_job):
    job = start_job("--compile", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "empty"))
    job.wait_for("chosen: ")  # the last line before the warm-up
    time.sleep(5)
    status, last_line = end_by(job)
    assert status == STOPPED and "before the first step" in last_line


def test_signal_swallowed_by_the_warm_up_still_stops_the_run(monkeypatch, error_of):
    def swallow(*_):
        with suppress(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train, "warm_up", swallow)
    line = error_of("--precision fp8", status=STOPPED)
    assert "SIGTERM: stopped before the first step" in line


def test_checkpoint_is_freed_before_the_warm_up(train_small, monkeypatch):
    train_small(steps=2)
    loaded = []
    alive = []

    def load_and_note(*args):
        start = load_start(*args)
        loaded.append(weakref.ref(start.state["model_state_dict"]["lm_head.weight"]))
        return start

    monkeypatch.setattr(train, "load_start", load_and_note)
    monkeypatch.setattr(train, "warm_up", lambda *_: alive.append(loaded[0]() is not None))
    train_small("--precision fp8", steps=3)
    assert alive == [False]


@pytest.mark.parametrize(
    "fault, expected",
    (
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 80000000000 bytes. Error code 12"
            ),
            "(80000000000 bytes requested): halve --micro_batch and double --grad_accum",
        ),
        (
            MemoryError("Unable to allocate 14.9 GiB for an array"),
            "(14.9 GiB requested): halve --micro_batch and double --grad_accum",
        ),
        (DataError("a.bin: changed during the run"), "a.bin: changed"),
    ),
    ids=("CPU", "NumPy", "data"),
)
def test_out_of_memory_and_bad_data_end_the_run_with_a_remedy(tmp_path, error_of, fault, expected):
    """test_warm_up.py covers GPU memory."""

    def fail(_):
        raise fault

    assert expected in error_of("--ckpt_every 2 --eval_every 0", model=model_with_fault(4, fail))
    assert last_step(tmp_path / "run") == 2


def test_skipped_step_is_saved_only_at_the_end(train_small):
    """A skipped step leaves the weights of the previous step unchanged."""

    def make_gradient_nan_once(model):
        def spoil(gradient):
            handle.remove()
            return gradient * math.nan

        handle = model.lm_head.weight.register_hook(spoil)

    flags = "--ckpt_every 1 --keep_last 9 --eval_every 0"
    third_is_skipped = model_with_fault(3, make_gradient_nan_once)
    directory = train_small(flags, steps=5, model=third_is_skipped)
    assert saved_steps(directory) == [1, 2, 4, 5]
    last_is_skipped = model_with_fault(2, make_gradient_nan_once)
    train_small(flags, steps=7, model=last_is_skipped, status=1)
    assert saved_steps(directory) == [1, 2, 4, 5, 6, 7]
    skipped_steps = [line["step"] for line in metrics(directory) if line["skipped"]]
    assert skipped_steps == [3, 7]


# --------------------------------------------------------------------------------------------------
# The rule: a directory with checkpoints resumes its own run


def test_repeated_fine_tuning_command_resumes(train_small, train_in_parts, new_log):
    """torchrun and Slurm repeat commands. The log says where the run began and that it resumes."""
    origin = train_small(steps=3, ckpt="origin") / "spider-step3.pt"
    flags = f"--resume {origin} --reset_steps --seed 1"
    whole = train_small(flags, steps=6, ckpt="whole")
    assert metrics(whole)[0]["step"] == 1
    new_log()
    assert_same_runs(whole, train_in_parts(flags, steps=6, cuts=(2, 4)))
    assert new_log().count("which resumes from its own checkpoint") == 2
    os.remove(origin)  # the run no longer needs it
    assert last_step(train_small(flags, steps=7, ckpt="parts")) == 7


NOTHING_LEFT = "no step is left to train, but settings differ: "


def test_command_without_steps_left_changes_no_file(train_small, new_log):
    """Even lines of metrics.jsonl after the checkpoint's step stay."""
    evaluated = train_small()
    unevaluated = train_small("--eval_every 0", ckpt="unevaluated")
    frequent = "--keep_last 3 --ckpt_every 2 --log_every 3 --sample_every 2 --profile"
    other_machine = "--precision bf16 --moe_backend loop --recompute core"
    for directory, flags, steps, status, expected in (
        (evaluated, "", 4, 0, "to continue, raise --max_steps"),
        (evaluated, frequent, 6, 0, "done: "),
        (evaluated, other_machine, 6, 0, "done: step 6, 384 bytes"),
        # an evaluation is still due, but not at step 5
        (unevaluated, "", 5, 0, "done: step 6"),
        (
            evaluated,
            "--lr 0.5 --seed 7",
            5,
            2,
            f"{NOTHING_LEFT}seed was 0, is 7; lr was 0.01, is 0.5: ",
        ),
        (
            evaluated,
            "--target_tokens 64",
            0,
            2,
            f"{NOTHING_LEFT}target_tokens was 12000000, is 64; warmup",
        ),
        (evaluated, "--n_loops 3", 6, 2, f"{NOTHING_LEFT}n_loops was 2, is 3: "),
        (
            evaluated,
            "--set core_loss_weight=0.5",
            6,
            2,
            f"{NOTHING_LEFT}core_loss_weight was 0.0, is 0.5: ",
        ),
    ):
        with open(directory / "metrics.jsonl", "a") as file:
            file.write('{"step": 7}\n')
        times = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
        written = contents(directory)
        new_log()
        train_small(flags, steps=steps, ckpt=directory.name, status=status)
        assert expected in new_log()
        assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == times
        assert contents(directory) == written


def test_refused_command_changes_no_file(tmp_path, train_small, error_of):
    directory = train_small("--ckpt_every 2 --keep_last 9", steps=6)
    (tmp_path / "folder").mkdir()
    before = contents(directory)
    for ckpt, flags, expected in (
        ("run", f"--resume {directory}/spider-step2.pt", "to go back, name a new --ckpt_dir"),
        ("run", f"--resume {directory}/spider-step6.pt --reset_steps", "name a new --ckpt_dir"),
        ("run", f"--resume {directory}/gone.pt", "to go back"),
        ("run", "--reset_steps", "a new --ckpt_dir"),
        ("other", "--reset_steps", "--reset_steps needs --resume"),
        ("other", f"--resume {tmp_path}/none.pt", "none.pt does not exist"),
        ("other", f"--resume {tmp_path}/folder", "no usable checkpoint in"),
        ("other", f"--resume {directory}", "no step is left to train: train longer (--max_steps, "),
        ("other", f"--resume {directory}", "or add --reset_steps"),
    ):
        assert expected in error_of(flags, ckpt=ckpt)
        assert contents(directory) == before
        assert not saved_steps(tmp_path / "other")
    assert last_step(train_small("--resume", directory / "spider-step6.pt", steps=7)) == 7


def test_resume_from_a_directory_takes_its_newest_good_checkpoint(train_small, new_log):
    """The directory may lie inside the new one, or be the new one, which then resumes."""
    flags = "--eval_every 0 --ckpt_every 2"
    whole = train_small(flags, steps=6, ckpt="whole")
    origin = train_small(flags, steps=4, ckpt="new/origin")
    (origin / "spider-step7.pt").write_bytes(b"damaged")
    for _ in range(2):
        other = train_small(flags, "--resume", origin, steps=6, ckpt="new")
        assert_same(final_state(other)["model_state_dict"], final_state(whole)["model_state_dict"])
        assert [line["step"] for line in metrics(other)] == [4, 5, 6]
    log = new_log()
    assert "its newest good checkpoint is spider-step4.pt" in log
    assert f"--resume {origin} is not read" in log
    assert last_step(train_small(flags, "--resume", other, steps=7, ckpt="new")) == 7
    train_small(flags, steps=7, ckpt="new")
    assert "is not read" not in new_log()  # --resume named "new" itself, then nothing
    tuned = train_small(flags, "--resume", origin, "--reset_steps", steps=1, ckpt="tuned")
    assert last_step(tuned) == 1


def test_fine_tuning_is_refused_in_the_directory_of_another_run(
    tmp_path, shards, train_small, error_of
):
    """Checkpoints of early versions have no `origin`. Their runs resume, and record the origin that
    the command names."""
    new_weights = train_small("--eval_every 0", steps=1)
    origin = train_small("--ckpt_every 1 --eval_every 0", steps=2, ckpt="origin")
    tune = f"--eval_every 0 --reset_steps --resume {origin}/spider-step"
    tuned = train_small(f"{tune}1.pt", steps=1, ckpt="tuned")
    continued = train_small("--eval_every 0 --resume", tuned, steps=2, ckpt="continued")
    for directory in (new_weights, tuned, continued):
        before = contents(directory)
        line = error_of(f"{tune}2.pt", ckpt=directory.name)
        assert f"{directory} did not begin from {origin}/spider-step2.pt" in line
        assert contents(directory) == before
    more = shutil.copytree(shards, tmp_path / "more")
    mixed = f"{tune}1.pt --data_dir {shards}:1,{more}:1"
    assert f"{tuned} was trained on other data" in error_of(mixed, steps=2, ckpt="tuned")
    path = tuned / "spider-step1.pt"
    early = torch.load(path)
    del early["origin"]
    torch.save(early, path)
    for steps in (2, 3):
        assert last_step(train_small(f"{tune}2.pt", steps=steps, ckpt="tuned")) == steps
    assert "did not begin from" in error_of(f"{tune}1.pt", ckpt="tuned")


# --------------------------------------------------------------------------------------------------
# Changes


def test_larger_batch_is_logged_and_still_stops_at_target_tokens(train_small, new_log):
    train_small("--target_tokens 640", steps=5)
    state = final_state(train_small("--target_tokens 640 --micro_batch 4", steps=0))
    assert state["bytes_seen"] == 5 * 64 + 3 * 128
    assert state["step"] == 8
    assert "global_batch was 64, is 128" in new_log()
    train_small("--target_tokens 64 --micro_batch 1", steps=9)
    assert "is beyond the horizon of 8 steps" in new_log()


def test_changed_data_or_order_warns_of_repeated_text(tmp_path, shards, train_small, new_log):
    """New names for the same directories, or weights in the same ratio, do not count as changes."""
    a, b, moved = (shutil.copytree(shards, tmp_path / name) for name in ("a", "b", "moved"))
    for steps, (flags, repeats) in enumerate(
        (
            (f"--data_dir {a}:1,{b}:1 --seed 0 --lr 0.01", False),
            (f"--data_dir {a}:1,{b}:1 --seed 1 --lr 0.01", True),
            (f"--data_dir {a}:1,{b}:1 --seed 1 --lr 0.02", False),
            (f"--data_dir {a}:3,{b}:7 --seed 1 --lr 0.02", True),
            (f"--data_dir {a}:0.3,{moved}:0.7 --seed 1 --lr 0.02", False),
            (f"--data_dir {a} --seed 1 --lr 0.02", True),
        ),
        1,
    ):
        train_small(flags, "--eval_every 0", steps=steps)
        assert ("is read again" in new_log()) == repeats, flags


def test_longer_schedule_warns_of_a_rising_learning_rate(train_small, new_log):
    """A 10-step schedule ends at a tenth of the peak rate; halfway through a 20-step schedule the
    rate is near the peak. The warning compares the last step's rate under the old and the present
    schedule, so resuming within a warm-up is no rise."""
    flags = "--eval_every 0 --warmup_steps 4"
    train_small(flags, "--target_tokens 640", steps=3)
    directory = train_small(flags, "--target_tokens 640", steps=0)
    log = new_log()
    assert f" and --resume {directory} --ckpt_dir NEW --target_tokens MORE" in log
    assert "learning rate rises" not in log
    longer = f"{flags} --target_tokens 1280"
    train_small(longer, "--resume", directory, steps=0, ckpt="other")
    assert "the learning rate rises from 1.60e-03 to 8.00e-03" in new_log()
    train_small(longer, steps=11)
    log = new_log()
    assert "learning rate rises" in log and "to continue, raise --max_steps" in log
    train_small(longer, steps=12)
    assert "learning rate rises" not in new_log()


def test_changed_settings_are_logged_and_persist(shards, train_small, new_log):
    """--set changes fields of the checkpoint's model; neither its other fields nor --n_loops need
    repeating. Only settings that change no shape can change."""
    directory = train_small("--n_loops 3", steps=1)
    argv = f"--data_dir {shards} --seq_len 32 --micro_batch 2 --ckpt_dir {directory} --eval_every 0"
    changes = "--n_loops 5 --set core_loss_weight=0.5,act_threshold=0.9"
    assert train.command_line(f"{argv} --max_steps 2 {changes}".split()) == 0
    log = new_log()
    assert "n_loops was 3, is 5" in log
    assert "act_threshold was 0.99, is 0.9; core_loss_weight was 0.0, is 0.5" in log
    assert metrics(directory)[-1]["core_loss"] > 0
    assert train.command_line(f"{argv} --max_steps 3 --set=".split()) == 0
    assert "settings differ" not in new_log()
    state = final_state(directory)
    assert (state["step"], state["n_loops"], state["cfg"]["n_loops"]) == (3, 5, 3)
    assert state["cfg"]["core_loss_weight"] == 0.5
