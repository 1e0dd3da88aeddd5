"""Lost ranks: the others name them, save what they can, and torchrun starts them again."""

import os
import re
import signal

import pytest
from training.jobs import (LIMIT, SHARDED, Job, die, last_lines, mistake, slow_disk, slow_to_name, steps_done, torchrun,
                           until, workers)

from conftest import final_state, metrics, run_flags
from spider.training.checkpoint_loading import find_checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP))
@pytest.mark.parametrize("victim", (0, 1))
def test_the_others_name_a_rank_that_was_killed_or_stands_still(tmp_path, shards, processes, number, victim):
    argv = run_flags(shards, tmp_path / "run", "--rank_timeout", "20", "--ckpt_every", "2", steps=100_000)
    job = Job(processes, tmp_path, 2, argv)
    until(lambda: steps_done(tmp_path / "run") > 4)  # the save of step 4 has waited for that of step 2
    os.kill(job.ranks[victim].pid, number)
    job.ranks[1 - victim].join(LIMIT / 2)
    assert job.ranks[1 - victim].exitcode == 2
    job.ranks[victim].kill()
    statuses, log = job.end()
    (line,) = last_lines(log)
    assert re.search(f"lost rank {victim} \\(.*process {job.ranks[victim].pid}\\)|lost rank 0 or its host", line), log
    assert final_state(tmp_path / "run")["step"] >= 2


@pytest.mark.slow
def test_replicas_of_a_rank_that_was_killed_in_a_pass_save_every_step_that_was_done(tmp_path, shards, processes):
    """They name it, too, one of them seconds after the first rank, in which the store is."""
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "2", steps=100)
    statuses, log = Job(processes, tmp_path, 3, argv, faults=[(die, 1, 3), (slow_to_name, 2, 3)]).end()
    assert statuses == [2, -signal.SIGKILL, 2] and all("lost rank 1" in line for line in last_lines(log)), log
    assert final_state(tmp_path / "run")["step"] == len(metrics(tmp_path / "run")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", (0, 1))
def test_a_bug_on_one_rank_is_one_full_traceback(tmp_path, shards, processes, victim):
    argv = run_flags(shards, tmp_path / "run", steps=100)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(mistake, victim, 3)]).end()
    assert statuses[victim] == 1 and statuses[1 - victim] == 2 and not last_lines(log), log
    assert log.count("Traceback") == log.count("ValueError: a mistake in the code") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP))
@pytest.mark.parametrize("form, victim, seconds", (((), 0, 300), ((), 1, 30), (SHARDED, 0, 300), (SHARDED, 1, 300)),
                         ids=("writer", "other", "first part", "other part"))
def test_a_rank_that_is_lost_while_another_waits_for_a_write_is_named(tmp_path, shards, processes, form, victim,
                                                                      seconds, number):
    """In time, but for a first rank that is left: it writes its file to the end."""
    argv = run_flags(shards, tmp_path / "run", *form, "--rank_timeout", "5", "--eval_every", "0", steps=2)
    job = Job(processes, tmp_path, 2, argv, faults=[(slow_disk, 0, seconds)])
    until(lambda: any(tmp_path.glob("run/.spider-step2*")))
    os.kill(job.ranks[victim].pid, number)
    job.ranks[1 - victim].join(120)
    assert job.ranks[1 - victim].exitcode == 2
    job.ranks[victim].kill()
    _, log = job.end()
    (line,) = last_lines(log)
    assert f"lost rank {victim}" in line, log
    assert bool(find_checkpoints(tmp_path / "run")) == (seconds == 30)


@pytest.mark.slow
def test_torchrun_starts_again_from_the_checkpoint_when_a_rank_was_killed(tmp_path, shards):
    directory = tmp_path / "run"
    job = torchrun(run_flags(shards, directory, "--ckpt_every", "5", "--shards", "2", steps=400), "--max-restarts", "1")
    until(lambda: (directory / "spider-step5.pt").exists())
    os.kill(workers(directory)[1], signal.SIGKILL)
    _, log = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, log
    assert "resuming from" in log and [line["step"] for line in metrics(directory)] == list(range(1, 401))
