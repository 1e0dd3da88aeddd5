"""Ranks: how they meet, what they agree on, and how all stop together: at signals, faults and full disks."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from training.jobs import (LIMIT, SHARDED, Job, bad_data, full_disk, last_lines, late, memory, slow_disk, steps_done,
                           stop_early, torchrun, until, workers)

from conftest import final_state, metrics, run_flags
from spider.errors import WorldError
from spider.training.checkpoint_loading import find_checkpoints
from spider.training.ranks import World, agree_on_prefix


@pytest.mark.parametrize("environ, shards, words", (
    (dict(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", MASTER_ADDR="here", MASTER_PORT="1"), 3,
     "--shards 3 does not divide 4 ranks"), ({}, 2, "--shards 2 does not divide 1 rank:"),
    (dict(RANK="x"), 1, "RANK='x': start with torchrun"),
    (dict(WORLD_SIZE="8"), 1, "WORLD_SIZE=8, but RANK is not set")))
def test_ranks_that_cannot_be_arranged_are_refused_in_one_line(environ, shards, words):
    with pytest.raises(WorldError, match=words):
        World(environ).join(torch.device("cpu"), shards, 1.0)


def test_ranks_that_meet_again_take_no_call_from_before_for_their_own():
    """Over a store that outlived two meetings, one of which nobody but rank 0 came to."""
    store, names = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60)), []
    store.set("spider/call", "early")
    store.set("spider/early/1", "one")
    store.set("spider/early/answers", "one two")
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            later = [pool.submit(agree_on_prefix, store.clone(), rank, 3, 60.0) for rank in (1, 2)]
            time.sleep(0.3)               # in which they answer the call from before
            (name,) = {agree_on_prefix(store, 0, 3, 60.0), *(one.result() for one in later)}
        names.append(name)
    assert names[0] != names[1] and "early" not in names[0]
    with pytest.raises(RuntimeError, match="rank 0 does not answer"):
        agree_on_prefix(store, 1, 3, 0.3)


def test_one_process_has_no_process_group_and_does_not_ask_anybody():
    world = World({})
    with world:
        world.join(torch.device("cpu"), 1, 1.0)
        assert not torch.distributed.is_initialized() and world.heartbeat is None
        world.own_targets = lambda: (5, None)
        assert world.on_rank0(lambda: 7) == 7 and world.targets_of_step() == 5
        assert [*world.distribute(range(0, 6, 2))] == [(0, 1), (2, 1), (4, 1)]
        world.own_votes["retry"] = lambda: True
        assert world.any_voted("retry") and world.should_print("a line", shared=False)
    assert json.dumps(world.votes) == "{}"


@pytest.mark.slow
def test_bad_data_seen_by_one_rank_is_reported_once_and_all_that_was_done_is_saved(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", steps=100)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(bad_data, 1, 3)]).end()
    assert statuses == [2, 2], log
    assert last_lines(log) == ["train.py: error: bad.bin: byte offset 6: id 999 is above 271: damaged, or not a shard"]
    assert final_state(tmp_path / "run")["step"] == 3 and "Traceback" not in log


@pytest.mark.slow
@pytest.mark.parametrize("victim, flags, saved", (
    (0, (), 3), (1, ("--grad_accum", "3"), 3), (0, ("--shards", "2"), 2), (1, ("--shards", "2"), 2)))
def test_want_of_memory_on_one_rank_ends_all_with_its_line(tmp_path, shards, processes, victim, flags, saved):
    """The first rank saves what was done, where it has all of it."""
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "2", *flags, steps=100)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(memory, victim, 3)]).end()
    assert statuses == [2, 2], log
    assert len(last_lines(log)) == 1 and "out of memory" in log and "Traceback" not in log
    assert final_state(tmp_path / "run")["step"] == saved


@pytest.mark.slow
@pytest.mark.parametrize("victim", (0, 1))
def test_a_signal_to_one_rank_before_the_first_step_ends_all(tmp_path, shards, processes, victim):
    argv = run_flags(shards, tmp_path / "run", steps=100)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(stop_early, victim, 0)]).end()
    assert statuses[victim] == 143 and 0 not in statuses and "Traceback" not in log, log
    (line,) = last_lines(log)
    assert "SIGTERM: stopped before the first step" in line


@pytest.mark.slow
@pytest.mark.parametrize("number, whom", (
    (signal.SIGTERM, "one"), (signal.SIGTERM, "all"), (signal.SIGTERM, "torchrun"), (signal.SIGINT, "all"),
    (signal.SIGINT, "torchrun")))
def test_a_signal_to_one_all_or_torchrun_saves_every_step_that_was_done(tmp_path, shards, number, whom):
    directory = tmp_path / "run"
    job = torchrun(run_flags(shards, directory, "--eval_every", "0", steps=100_000))
    until(lambda: steps_done(directory) > 2)
    pids = workers(directory)
    assert len(pids) == 2
    for pid in {"one": pids[1:], "all": [*pids, job.pid], "torchrun": [job.pid]}[whom]:
        os.kill(pid, number)
    _, log = job.communicate(timeout=LIMIT)
    assert len(last_lines(log)) == 1 and f"{number.name}: stopped after step" in log, log
    assert final_state(directory)["step"] == len(metrics(directory)) and "lost rank" not in log
    until(lambda: not workers(directory), 60)


@pytest.mark.slow
def test_a_full_disk_on_rank_0_stops_nobody_and_is_tried_again(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "3", steps=8)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(full_disk, 0, 3)]).end()
    assert statuses == [0, 0], log
    assert log.count("CHECKPOINT NOT SAVED") >= 1 and final_state(tmp_path / "run")["step"] == 8


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_all_with_a_line_that_says_what_is_left(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "3", steps=8)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(full_disk, 0, 100)]).end()
    assert statuses == [2, 2] and not list((tmp_path / "run").glob("*.pt")), log
    (line,) = set(last_lines(log))       # of both, should the store go with rank 0
    assert "step 8 could not be saved" in line and "make room" in line


@pytest.mark.parametrize("form, victim, steps", (
    ((), 0, 2), *(pytest.param(SHARDED, *one, marks=pytest.mark.slow) for one in ((1, 1), (0, 2)))),
                         ids=("file", "part", "parts"))
def test_a_write_may_take_longer_than_ranks_wait_for_a_lost_one(tmp_path, shards, processes, form, victim, steps):
    """In the middle, where the next save waits for it, and at the end."""
    argv = run_flags(shards, tmp_path / "run", *form, "--rank_timeout", "3", "--ckpt_every", "1", "--eval_every", "0",
                     steps=steps)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(slow_disk, victim, 4.5)]).end()
    assert statuses == [0, 0], log
    assert [one.step for one in find_checkpoints(tmp_path / "run")] == [*range(1, steps + 1)]


@pytest.mark.slow
def test_ranks_wait_for_one_that_starts_late(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--rank_timeout", "15", steps=2)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(late, 1, 20)]).end()
    assert statuses == [0, 0], log


@pytest.mark.slow
def test_a_second_job_in_the_same_directory_is_refused_once(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "2", steps=100_000)
    first = Job(processes, tmp_path, 2, argv)
    until(lambda: steps_done(tmp_path / "run") > 1)
    statuses, log = Job(processes, tmp_path, 2, argv).end()
    assert statuses == [2, 2] and len(set(last_lines(log))) == 1 and "another run is using" in log, log
    os.kill(first.ranks[1].pid, signal.SIGTERM)
    statuses, log = first.end()
    assert statuses == [143, 143] and len(last_lines(log)) == 1, log
