"""A run that is killed, stopped or changed, and resumed: the same bits, the same rule, and what it
logs."""

import os
import random
import shutil
import signal
import time

import pytest
import torch

import train
from conftest import (
    SMALL,
    assert_same,
    assert_same_runs,
    contents,
    final_state,
    has_fp8,
    metrics,
    refused,
    run,
    run_flags,
    run_in_parts,
)
from jobs import Job, at_step, nan, signalled, sleeps, steps_done, unread, until
from spider import boundaries, optim
from spider.checkpoint import find_checkpoints

# --------------------------------------------------------------------------------------------------
# To the bit

KINDS = (
    ("--precision", "fp8", "--fp8_experts"),
    ("--optimizer", "adamw8bit", "--grad_accum", "2"),
    ("--engram_reset", "--dropout", "0.3", "--random_loops", "--sample_every", "9"),
    ("--set", f"{SMALL},boundaries=learned,segment_offsets=3,core_loss_weight=0.2"),
)
ALSO = (
    ("--recompute", "core"),
    ("--precision", "fp32", "--no_gradient_checkpointing"),
    ("--precision", "bf16"),
    ("--optimizer", "adamw"),
    ("--moe_backend", "loop"),
    ("--schedule", "wsd", "--target_tokens", "700"),
    ("--deterministic",),
)


@pytest.mark.parametrize(
    "flags",
    (*KINDS, *(pytest.param(flags, marks=pytest.mark.slow) for flags in ALSO)),
    ids=lambda flags: " ".join(flags).replace(SMALL, ""),
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path, shards, monkeypatch, flags
):
    """24 steps of two sequences reach the third epoch of 20; a stop lies in each of the first two,
    one of them at an evaluation, which the run catches up on."""
    monkeypatch.setattr(boundaries, "TRUST_BEGINS", 2)
    monkeypatch.setattr(boundaries, "TRUST_COMPLETE", 5)
    flags = ("--eval_every", "7", *flags)
    whole = run(tmp_path, shards, *flags, steps=24, ckpt="whole")
    assert_same_runs(whole, run_in_parts(tmp_path, shards, *flags, steps=24, cuts=(5, 14)))
    assert final_state(whole)["epoch"] >= 2


def test_every_step_can_be_the_one_where_a_run_is_stopped(tmp_path, shards):
    """The last one too, before the evaluation that ends the run."""
    whole = run(tmp_path, shards, "--ckpt_every", "3", steps=7, ckpt="whole")
    assert_same_runs(
        whole, run_in_parts(tmp_path, shards, "--ckpt_every", "3", steps=7, cuts=range(1, 8))
    )


@pytest.mark.parametrize(
    "before, after", (((3, 7), (1, 9)), ((2, 11), (4, 13)), ((2, 10), (3, 12)))
)
def test_tables_are_cleared_once_an_epoch_also_where_the_micro_batch_changes(
    tmp_path, shards, monkeypatch, before, after
):
    """Sequence 20 begins the second epoch; the third lies beyond."""
    cleared, reset = [], optim.RowwiseAdagrad.reset
    monkeypatch.setattr(
        optim.RowwiseAdagrad, "reset", lambda tables: (cleared.append(1), reset(tables))
    )
    for micro_batch, steps in (before, after):
        run(
            tmp_path,
            shards,
            "--engram_reset",
            "--eval_every",
            "0",
            "--micro_batch",
            str(micro_batch),
            steps=steps,
        )
    assert len(cleared) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags", ((), ("--precision", "fp8"), ("--moe_backend", "grouped")), ids=" ".join
)
def test_deterministic_runs_resume_exactly_on_a_gpu(tmp_path, shards, flags):
    if "fp8" in flags and not has_fp8():
        pytest.skip("this GPU has no FP8")
    flags = ("--device", "cuda", "--deterministic", "--dropout", "0.3", *flags)
    whole = run(tmp_path, shards, *flags, steps=20, ckpt="whole")
    assert_same_runs(whole, run_in_parts(tmp_path, shards, *flags, steps=20, cuts=(7,)))


@pytest.mark.slow
def test_random_combinations_of_flags_and_interruptions_resume_exactly(tmp_path, shards):
    """Twelve draws from every flag that changes the arithmetic, the data or the loop, each stopped
    in three steps."""
    generator = random.Random(0)
    choices = [
        ("--random_loops",),
        ("--grad_accum", "3"),
        ("--no_gradient_checkpointing",),
        ("--engram_reset",),
        ("--schedule", "wsd", "--target_tokens", "900"),
        ("--seed", "5"),
        ("--micro_batch", "3"),
        ("--eval_every", "3"),
        ("--ckpt_every", "7"),
        ("--sample_every", "5"),
        ("--moe_backend", "loop"),
        ("--dropout", "0.3"),
    ]
    for case in range(12):
        flags = [word for choice in choices if generator.random() < 0.4 for word in choice]
        flags += [
            "--optimizer",
            generator.choice(("adamw", "adamw8bit", "muon")),
            "--precision",
            generator.choice(("fp32", "bf16", "fp8")),
        ]
        steps = generator.randint(20, 40)
        whole = run(tmp_path, shards, *flags, steps=steps, ckpt=f"whole{case}")
        cuts = sorted(generator.sample(range(1, steps), 3))
        assert_same_runs(
            whole,
            run_in_parts(tmp_path, shards, *flags, steps=steps, cuts=cuts, ckpt=f"parts{case}"),
        )


# --------------------------------------------------------------------------------------------------
# Kills and signals


def stopped(job: Job, number=signal.SIGTERM) -> tuple[int, str]:
    """Return the status and the log of a job that a signal ends."""
    os.kill(job.ranks[0].pid, number)
    (status,), log = job.end()
    return status, log


def saving(directory) -> bool:
    return directory.exists() and any(
        name.startswith(".spider-step") for name in os.listdir(directory)
    )


@pytest.mark.parametrize("kills", (4, pytest.param(50, marks=pytest.mark.slow)))
def test_a_run_that_is_killed_again_and_again_ends_like_an_uninterrupted_one(
    tmp_path, shards, processes, kills
):
    """SIGKILL at random moments, every other one inside a save; the same command each time."""
    directory, inside = tmp_path / "killed", 0
    flags = ("--ckpt_every", "2", "--no_gradient_checkpointing", "--eval_every", "50")
    for kill in range(kills):
        job = Job(processes, tmp_path, 1, run_flags(shards, directory, *flags, steps=100_000))
        process = job.ranks[0]
        process.join(random.uniform(0.2, 1.2))
        while kill % 2 and process.is_alive():
            if saving(directory):
                os.kill(process.pid, signal.SIGSTOP)  # to be inside it still
                time.sleep(0.01)
                if saving(directory):
                    break
                os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.0005)
        assert process.is_alive(), job.said()
        process.kill()
        job.end()
        inside += saving(directory)
    steps = max((one.step for one in find_checkpoints(directory)), default=0) + 5
    run(tmp_path, shards, *flags, steps=steps, ckpt="killed")
    assert_same_runs(run(tmp_path, shards, *flags, steps=steps, ckpt="whole"), directory)
    assert not saving(directory) and inside >= kills // 4


@pytest.mark.parametrize(
    "slow, number",
    (
        (None, signal.SIGTERM),
        (None, signal.SIGUSR1),
        ("evaluate", signal.SIGINT),
        ("log_sample", signal.SIGTERM),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (None, signal.SIGINT),
                (None, signal.SIGHUP),
                ("evaluate", signal.SIGTERM),
                ("log_sample", signal.SIGINT),
            )
        ),
    ),
)
def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(
    tmp_path, shards, processes, slow, number
):
    """It ends an evaluation or a sample at once."""
    flags = ("--eval_every", "7", *(("--sample_every", "7") if slow == "log_sample" else ()))
    job = Job(
        processes,
        tmp_path,
        1,
        run_flags(shards, tmp_path / "stopped", *flags, steps=100_000),
        faults=[(sleeps, 0, slow)] if slow else (),
    )
    job.wait_for("SLEEPS" if slow else "step 5/")
    status, log = stopped(job, number)
    assert status == 128 + number
    assert log.splitlines()[-1].startswith(f"train.py: {number.name}: stopped after step")
    step = final_state(tmp_path / "stopped")["step"]
    assert step == 7 if slow else step >= 5
    parts = run(tmp_path, shards, *flags, steps=step + 2, ckpt="stopped")
    assert_same_runs(run(tmp_path, shards, *flags, steps=step + 2, ckpt="whole"), parts)


def test_after_a_signal_the_step_is_neither_evaluated_nor_sampled(
    tmp_path, shards, monkeypatch, capsys
):
    """The time until a kill is for saving. The resumed run makes them."""
    monkeypatch.setattr(train, "accumulate", train.accumulate)
    signalled(3)
    flags = ("--sample_every", "4")
    assert train.command_line(run_flags(shards, tmp_path / "run", *flags)) == 128 + signal.SIGTERM
    said, state = capsys.readouterr().err, final_state(tmp_path / "run")
    assert (
        (state["step"], state["val_loss"]) == (4, None)
        and "evaluating" not in said
        and "continues" not in said
    )
    assert "val_bpb" not in metrics(tmp_path / "run")[-1]
    run(tmp_path, shards, *flags, steps=4)
    assert (
        final_state(tmp_path / "run")["val_loss"] > 0
        and "step 4 continues" in capsys.readouterr().err
    )


@pytest.mark.parametrize("slow", ("open_data", "load_origin", "warm_up"))
def test_a_signal_before_the_first_step_ends_the_run_at_once_and_saves_nothing(
    tmp_path, shards, processes, slow
):
    job = Job(
        processes,
        tmp_path,
        1,
        run_flags(shards, tmp_path / "run", "--precision", "fp8"),
        faults=[(sleeps, 0, slow)],
    )
    job.wait_for("SLEEPS")
    status, log = stopped(job)
    assert status == 128 + signal.SIGTERM
    assert (
        not list((tmp_path / "run").glob("*.pt"))
        and "before the first step" in log.splitlines()[-1]
    )


def test_a_second_signal_ends_the_process_at_once(tmp_path, shards, processes):
    job = Job(
        processes,
        tmp_path,
        1,
        run_flags(shards, tmp_path / "run"),
        faults=[(sleeps, 0, "accumulate")],
    )
    job.wait_for("SLEEPS")
    job.ranks[0].terminate()
    job.wait_for("repeat to quit at once")
    assert stopped(job)[0] == -signal.SIGTERM


def test_a_signal_saves_also_where_nobody_reads_the_log(tmp_path, shards, processes):
    directory = tmp_path / "run"
    job = Job(
        processes,
        tmp_path,
        1,
        run_flags(shards, directory, steps=100_000),
        faults=[(unread, 0, None)],
    )
    until(lambda: steps_done(directory) > 5)
    assert stopped(job)[0] == 128 + signal.SIGTERM and final_state(directory)["step"] > 5


@pytest.mark.slow
def test_a_signal_during_compilation_does_not_wait_for_its_end(tmp_path, shards, processes):
    job = Job(
        processes,
        tmp_path,
        1,
        run_flags(shards, tmp_path / "run", "--compile", steps=100_000),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "empty"),
    )
    job.wait_for("GFLOP per byte")
    time.sleep(5)
    status, log = stopped(job)
    assert status == 128 + signal.SIGTERM and "before the first step" in log.splitlines()[-1]


@pytest.mark.parametrize(
    "fault, said",
    (
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
            "(2.50 GiB requested)",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: "
                "you tried to "
                "allocate 80000000000 bytes. Error code 12"
            ),
            "(80000000000 bytes requested)",
        ),
        (MemoryError("Unable to allocate 14.9 GiB for an array"), "(14.9 GiB requested)"),
        (train.common.DataError("a.bin: changed during the run"), "a.bin: changed"),
    ),
    ids=lambda fault: str(fault)[:15],
)
def test_lack_of_memory_and_bad_data_end_a_run_with_advice(
    tmp_path, shards, monkeypatch, capsys, fault, said
):
    def fail(_):
        raise fault

    monkeypatch.setattr(train, "accumulate", train.accumulate)
    at_step(3, before=fail)
    line = refused(
        run_flags(shards, tmp_path / "run", "--ckpt_every", "2", "--eval_every", "0"), capsys
    )
    assert said in line and (
        isinstance(fault, train.common.DataError) or "--micro_batch (now 2)" in line
    )
    assert final_state(tmp_path / "run")["step"] == 2


def test_a_skipped_step_is_saved_only_where_the_run_ends(tmp_path, shards, monkeypatch):
    """Its weights are those of the step before."""
    monkeypatch.setattr(train, "accumulate", train.accumulate)
    nan(2)
    flags = ("--ckpt_every", "1", "--keep_last", "9", "--eval_every", "0")
    directory = run(tmp_path, shards, *flags, steps=5)
    assert [one.step for one in find_checkpoints(directory)] == [1, 2, 4, 5]
    nan(1)
    run(tmp_path, shards, *flags, steps=7)
    assert [one.step for one in find_checkpoints(directory)] == [1, 2, 4, 5, 6, 7]


# --------------------------------------------------------------------------------------------------
# The rule: where a directory holds checkpoints, their run resumes


def test_a_fine_tuning_command_given_again_resumes(tmp_path, shards, capsys):
    """As torchrun and Slurm give it: it says where the run begins, not that it begins again."""
    origin = run(tmp_path, shards, steps=3, ckpt="origin") / "spider-step3.pt"
    flags = ("--resume", str(origin), "--reset_steps", "--seed", "1")
    whole = run(tmp_path, shards, *flags, steps=6, ckpt="whole")
    assert metrics(whole)[0]["step"] == 1
    capsys.readouterr()
    assert_same_runs(whole, run_in_parts(tmp_path, shards, *flags, steps=6, cuts=(2, 4)))
    assert capsys.readouterr().err.count("which resumes from its own checkpoint") == 2
    os.remove(origin)  # it is no longer needed
    assert final_state(run(tmp_path, shards, *flags, steps=7, ckpt="parts"))["step"] == 7


def test_a_checkpoint_named_for_an_empty_directory_continues_there_exactly(tmp_path, shards):
    flags = ("--ckpt_every", "3", "--eval_every", "0")
    whole = run(tmp_path, shards, *flags, steps=7, ckpt="whole")
    origin = run(tmp_path, shards, *flags, steps=4, ckpt="origin") / "spider-step4.pt"
    other = run(tmp_path, shards, *flags, "--resume", str(origin), steps=7, ckpt="other")
    assert_same(final_state(other)["model_state_dict"], final_state(whole)["model_state_dict"])
    assert [line["step"] for line in metrics(other)] == [4, 5, 6, 7]


def test_a_run_that_ends_where_it_began_still_saves_into_its_own_directory(tmp_path, shards):
    first = run(tmp_path, shards, steps=2, ckpt="first")
    other = run(tmp_path, shards, "--resume", str(first / "spider-step2.pt"), steps=2, ckpt="other")
    assert_same(final_state(other)["model_state_dict"], final_state(first)["model_state_dict"])


def test_going_back_or_starting_over_inside_a_directory_is_an_error_that_names_the_remedy(
    tmp_path, shards, capsys
):
    directory = run(tmp_path, shards, "--ckpt_every", "2", "--keep_last", "9", steps=6)
    before = contents(directory)
    for flags, said in (
        (("--resume", directory / "spider-step2.pt"), "to go back, name a new --ckpt_dir"),
        (("--resume", directory / "spider-step6.pt", "--reset_steps"), "name a new --ckpt_dir"),
        (("--resume", directory / "gone.pt"), "to go back"),
        (("--reset_steps",), "a new --ckpt_dir"),
    ):
        assert said in refused(run_flags(shards, directory, *map(str, flags)), capsys)
        assert contents(directory) == before
    assert (
        final_state(run(tmp_path, shards, "--resume", str(directory / "spider-step6.pt"), steps=7))[
            "step"
        ]
        == 7
    )


def test_what_cannot_begin_a_run_is_an_error(tmp_path, shards, capsys):
    (tmp_path / "folder").mkdir()
    for flags, said in (
        (("--reset_steps",), "--reset_steps needs --resume"),
        (("--resume", tmp_path / "none.pt"), "none.pt does not exist"),
        (("--resume", tmp_path / "folder"), "no usable checkpoint in"),
    ):
        assert said in refused(run_flags(shards, tmp_path / "new", *map(str, flags)), capsys)


def test_a_directory_of_a_run_stands_for_its_newest_good_checkpoint(tmp_path, shards, capsys):
    """Also below the new directory, and as the new directory itself, which then resumes."""
    flags = ("--eval_every", "0", "--ckpt_every", "2")
    whole = run(tmp_path, shards, *flags, steps=6, ckpt="whole")
    origin = run(tmp_path, shards, *flags, steps=4, ckpt="new/origin")
    (origin / "spider-step7.pt").write_bytes(b"damaged")
    for _ in range(2):
        other = run(tmp_path, shards, *flags, "--resume", str(origin), steps=6, ckpt="new")
        assert_same(final_state(other)["model_state_dict"], final_state(whole)["model_state_dict"])
    said = capsys.readouterr().err
    assert (
        "its newest good checkpoint is spider-step4.pt" in said
        and f"--resume {origin} is not read" in said
    )
    assert (
        final_state(run(tmp_path, shards, *flags, "--resume", str(other), steps=7, ckpt="new"))[
            "step"
        ]
        == 7
    )
    run(tmp_path, shards, *flags, steps=7, ckpt="new")
    assert "is not read" not in capsys.readouterr().err  # that one was named, and none
    tuned = run(
        tmp_path, shards, *flags, "--resume", str(origin), "--reset_steps", steps=1, ckpt="tuned"
    )
    assert final_state(tuned)["step"] == 1


def test_with_the_default_directory_a_reset_begins_beside_the_run_it_came_from(
    tmp_path, shards, monkeypatch
):
    """The original's command; given again, it resumes."""
    monkeypatch.chdir(tmp_path)
    run(tmp_path, shards, steps=3, ckpt="checkpoints")
    argv = [
        "--resume",
        "checkpoints/spider-step3.pt",
        "--reset_steps",
        "--data_dir",
        str(shards),
        "--seq_len",
        "32",
        "--micro_batch",
        "2",
        "--eval_every",
        "0",
    ]
    for steps in (2, 4):
        assert train.command_line([*argv, "--max_steps", str(steps)]) == 0
        assert [
            line["step"] for line in metrics(tmp_path / "checkpoints" / "from-spider-step3")
        ] == [*range(1, steps + 1)]
    assert find_checkpoints(tmp_path / "checkpoints")[-1].step == 3


def test_two_runs_cannot_work_in_one_directory(tmp_path, shards, processes, capsys):
    job = Job(
        processes,
        tmp_path,
        1,
        run_flags(shards, tmp_path / "run"),
        faults=[(sleeps, 0, "accumulate")],
    )
    job.wait_for("SLEEPS")
    assert "another process is using it" in refused(run_flags(shards, tmp_path / "run"), capsys)
    job.ranks[0].kill()
    job.end()
    run(tmp_path, shards)  # the lock ended with its process


# --------------------------------------------------------------------------------------------------
# Changes


def test_a_larger_batch_resumes_to_the_same_number_of_bytes_and_logs_the_change(
    tmp_path, shards, capsys
):
    run(tmp_path, shards, "--target_tokens", "640", steps=5)
    state = final_state(
        run(tmp_path, shards, "--target_tokens", "640", "--micro_batch", "4", steps=0)
    )
    assert state["bytes_seen"] == 5 * 64 + 3 * 128 and state["step"] == 8
    assert "micro_batch was 2, is 4" in capsys.readouterr().err


def test_other_data_or_another_order_of_it_is_said_to_repeat_and_skip_text(
    tmp_path, shards, capsys
):
    """Not other names of the same directories, nor weights of the same proportions."""
    a, b, moved = (tmp_path / name for name in ("a", "b", "moved"))
    for directory in (a, b, moved):
        shutil.copytree(shards, directory)
    for steps, (mixture, seed, lr, reorders) in enumerate(
        (
            (f"{a}:1,{b}:1", "0", "0.01", False),
            (f"{a}:1,{b}:1", "1", "0.01", True),
            (f"{a}:1,{b}:1", "1", "0.02", False),
            (f"{a}:3,{b}:7", "1", "0.02", True),
            (f"{a}:0.3,{moved}:0.7", "1", "0.02", False),
            (a, "1", "0.02", True),
        ),
        1,
    ):
        flags = ("--data_dir", str(mixture), "--seed", seed, "--lr", lr, "--eval_every", "0")
        run(tmp_path, shards, *flags, steps=steps)
        assert ("is read again" in capsys.readouterr().err) == reorders


def test_a_run_that_is_past_its_last_step_has_no_advice_about_further_ones(
    tmp_path, shards, capsys
):
    flags = ("--eval_every", "0", "--target_tokens", "640", "--warmup_steps", "0")
    run(tmp_path, shards, *flags, steps=0)
    run(tmp_path, shards, *flags[:2], "--target_tokens", "6400", steps=5)
    said = capsys.readouterr().err
    assert (
        "done: step 10" in said and "ends the run at" not in said and "rate rises from" not in said
    )


def test_a_checkpoint_of_another_model_is_named(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=1)
    argv = [
        flag
        for flag in run_flags(shards, directory)
        if not flag.startswith("--set") and "=" not in flag
    ]
    line = refused([*argv, "--model", "small"], capsys)
    assert f"error: {directory / 'spider-step1.pt'}: holds another model: hidden_size is " in line


def test_a_finished_run_trained_longer_warns_that_its_rate_rises(tmp_path, shards, capsys):
    """The schedule of ten steps ends at a tenth of the rate; in the middle of one of twenty it is
    near the peak. The next sequence, 20, begins an epoch."""
    flags = ("--eval_every", "0", "--warmup_steps", "0")
    directory = run(tmp_path, shards, *flags, "--target_tokens", "640", steps=0)
    assert f"the same flags, but --resume {directory}, a new --ckpt_dir" in capsys.readouterr().err
    longer = (*flags, "--target_tokens", "1280", "--engram_reset")
    run(tmp_path, shards, *longer, "--resume", str(directory), steps=0, ckpt="other")
    said = capsys.readouterr().err
    (warning,) = [line for line in said.splitlines() if "learning rate rises" in line]
    assert "tables are cleared" in warning and "--keep_last" not in warning
    run(tmp_path, shards, *longer, "--no-engram_reset", steps=11)
    said = capsys.readouterr().err
    (warning,) = [line for line in said.splitlines() if "learning rate rises" in line]
    assert (
        "tables are cleared" not in warning
        and f"--resume {directory}" in warning
        and "towards step 20" in warning
    )
    assert "to continue, raise --max_steps" in said
    run(tmp_path, shards, *longer, "--no-engram_reset", steps=12)
    assert "learning rate rises" not in capsys.readouterr().err


def test_a_rise_amid_an_epoch_clears_no_tables_and_one_of_the_warm_up_is_none(
    tmp_path, shards, capsys
):
    run(
        tmp_path,
        shards,
        "--eval_every",
        "0",
        "--warmup_steps",
        "0",
        "--target_tokens",
        "576",
        steps=0,
    )
    run(
        tmp_path,
        shards,
        "--eval_every",
        "0",
        "--warmup_steps",
        "0",
        "--target_tokens",
        "1280",
        "--engram_reset",
        steps=10,
    )
    (warning,) = [
        line for line in capsys.readouterr().err.splitlines() if "learning rate rises" in line
    ]
    assert "step 20" in warning and "tables are cleared" not in warning
    for steps in (1, 2):  # from a half to the whole of the rate
        run(tmp_path, shards, "--eval_every", "0", "--warmup_steps", "1", steps=steps, ckpt="warm")
    assert "learning rate rises" not in capsys.readouterr().err
    for warmup, target, steps in (("0", "640", 0), ("20", "9999", 11)):
        run(
            tmp_path,
            shards,
            "--eval_every",
            "0",
            "--min_lr_fraction",
            "0.1",
            "--warmup_steps",
            warmup,
            "--target_tokens",
            target,
            steps=steps,
            ckpt="low",
        )
    # 0.1 + 0.45 * (1 + cos(0.9 * pi)) of 0.01; and 10/21 of it, amid a longer warm-up
    assert "rises from 1.22e-03 to 4.76e-03" in capsys.readouterr().err


def test_hyperparameters_are_those_of_this_runs_flags(tmp_path, shards, capsys):
    run(tmp_path, shards, "--optimizer", "adamw", steps=1)
    directory = run(
        tmp_path, shards, "--optimizer", "adamw", "--weight_decay", "0.3", "--beta1", "0.8", steps=2
    )
    group = final_state(directory)["optimizer_state_dict"]["adamw"]["param_groups"][0]
    assert group["weight_decay"] == 0.3 and group["betas"] == (0.8, 0.95)
    assert "weight_decay was 0.1, is 0.3" in capsys.readouterr().err


def test_settings_without_a_shape_change_with_a_line_and_stay_changed(tmp_path, shards, capsys):
    """--set changes the checkpoint's model, so that nothing else of it need be given again."""
    run(tmp_path, shards, steps=1)
    capsys.readouterr()
    directory = run(tmp_path, shards, "--set", "core_loss_weight=0.5,act_threshold=0.9", steps=2)
    assert (
        "act_threshold was 0.99, is 0.9; core_loss_weight was 0.0, is 0.5"
        in capsys.readouterr().err
    )
    assert metrics(directory)[-1]["core_loss"] > 0
    run(tmp_path, shards, "--set", "", steps=3)
    assert "act_threshold" not in capsys.readouterr().err
    assert (
        final_state(directory)["step"] == 3
        and final_state(directory)["cfg"]["core_loss_weight"] == 0.5
    )


def test_loops_of_a_run_stay_the_same_when_it_resumes_and_others_are_named(
    tmp_path, shards, capsys
):
    directory = run(tmp_path, shards, "--n_loops", "3", steps=1)
    argv = [
        "--data_dir",
        str(shards),
        "--seq_len",
        "32",
        "--micro_batch",
        "2",
        "--ckpt_dir",
        str(directory),
        "--eval_every",
        "0",
        "--max_steps",
    ]
    assert train.command_line([*argv, "2", "--n_loops", "5"]) == 0
    assert "n_loops was 3, is 5" in capsys.readouterr().err
    assert (
        train.command_line([*argv, "3"]) == 0 and "settings differ" not in capsys.readouterr().err
    )
    state = final_state(directory)
    assert (state["step"], state["n_loops"], state["cfg"]["n_loops"]) == (3, 5, 3)
