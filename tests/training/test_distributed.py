"""Several ranks under gloo: equal results on every layout, one checkpoint for all, stops and
faults."""

import os
import re
import signal
import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from loguru import logger

from collectives import Collective, disagreements, record_to_file, recorded
from conftest import SMALL, STOPPED, assert_same_runs, final_state, make_shards, metrics
from jobs import (
    IN_GROUP,
    LIMIT,
    Job,
    assert_same_losses,
    file_limit,
    last_lines,
    nan,
    out_of_memory,
    rank_variables,
    runs_alone,
    signalled,
    steps_done,
    torchrun,
    until,
    workers,
)
from spider.errors import SpiderError, WorldError
from spider.training import optim
from spider.training.distributed import World

NO_EVAL = "--eval_every 0"
HALVED = f"{SMALL},engram_byte_dim=32"  # half of each matrix fills whole blocks of 8-bit AdamW


def end_well(job) -> str:
    """Wait until torchrun ends, which must succeed; return the log."""
    _, log = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, log
    return log


# --------------------------------------------------------------------------------------------------
# The start


TWO = dict(RANK="0", WORLD_SIZE="2")
NOWHERE = dict(RANK="1", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


@pytest.mark.parametrize(
    "environ, shards, message",
    (
        (dict(RANK="-1", WORLD_SIZE="2"), 1, "RANK=-1, WORLD_SIZE=2: "),
        (dict(RANK="2", WORLD_SIZE="2"), 1, "RANK=2, .*: start all ranks with torchrun"),
        (dict(WORLD_SIZE="2"), 1, "RANK=unset, WORLD_SIZE=2: "),
        (dict(LOCAL_RANK="1"), 1, "LOCAL_RANK=1, "),
        (NOWHERE, 3, "--shards 3 does not divide 4 ranks"),
        (NOWHERE, 1, "rank 1 of 4 cannot reach the others"),
        (TWO, 1, "MASTER_ADDR expected, but not set.*: start all ranks with torchrun"),
    ),
)
def test_failed_join_reports_the_reason(monkeypatch, environ, shards, message):
    for variable in environ.items():
        monkeypatch.setenv(*variable)
    with pytest.raises(WorldError, match=message):
        World(environ).join(torch.device("cpu"), shards, 1.0)


def test_joining_for_more_than_a_minute_logs_a_warning(monkeypatch):
    events = Mock()
    monkeypatch.setattr(threading, "Timer", events.Timer)
    world = World(rank_variables(0, 2, port=0))
    monkeypatch.setattr(world, "_start_groups", events.start_groups)
    monkeypatch.setattr(world, "all", events.all)
    world.join(torch.device("cpu"), 1, 1.0)
    calls = [name for name, *_ in events.mock_calls]
    assert calls == "Timer Timer().start start_groups all Timer().cancel".split()
    seconds, log, (line,) = events.Timer.call_args.args
    assert (seconds, log) == (60, logger.warning) and "NCCL_P2P_DISABLE=1" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="would start NCCL")
@pytest.mark.parametrize(
    "gpus, visible, indices, message",
    (
        ("abc", 1, [0, 0, 0], "cannot reach the others: (?!Wait timeout)"),
        ("aba", 2, [0, 1, 0], "ranks 0, 2 of 3 would share GPUs"),
    ),
)
def test_rank_takes_the_gpu_of_its_local_rank_and_shares_none(
    monkeypatch, gpus, visible, indices, message
):
    """Each rank in turn joins after the others have stored their entries of `gpus`; without CUDA
    it fails to start NCCL. torchrun has restarted the ranks with the store of earlier attempts."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for rank, index in enumerate(indices):
        own = SimpleNamespace(uuid=gpus[rank])
        store = torch.distributed.HashStore()
        store.set_timeout(timedelta(seconds=20))
        for other in {0, 1, 2} - {rank}:
            store.set(f"attempt3/gpu{other}", gpus[other])
            store.set(f"attempt3/read{other}", "")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, own=own: own)
        rendezvous = Mock(return_value=iter([(store, 0, 0)]))
        monkeypatch.setattr(torch.distributed, "rendezvous", rendezvous)
        world = World(rank_variables(rank, 3, port=0))
        with pytest.raises(SpiderError, match=message):
            world.join(torch.device("cuda"), 1, 20.0)
        assert world.device.index == index


def test_single_process_reads_each_batch_when_due():
    read = []

    def batches():
        for number in range(3):
            read.append(number)
            yield number

    assert next(World({}).distribute(batches())) == (0, 1)
    assert read == [0]


# --------------------------------------------------------------------------------------------------
# Equal results


@pytest.mark.parametrize(
    "first, flags, flags_of_two",
    (
        (1, "--optimizer muon --random_loops", ""),
        (2, "--optimizer adamw --engram_reset", "--shards 2 --sample_every 6"),
    ),
    ids=("from one to two replicas", "from two shards to one"),
)
def test_run_resumed_on_a_different_number_of_ranks_has_equal_losses(
    tmp_path, shards, argv_of, run_on, first, flags, flags_of_two
):
    """Compare six steps on one rank and six on two, in either order, with twelve on one."""
    other = make_shards(tmp_path / "other")
    flags += f" --global_batch 128 --precision fp32 --data_dir {shards}:0.7,{other}:0.3"
    flags += " --ckpt_every 6 --eval_every 6"
    runs_alone(argv_of(flags, steps=12, ckpt="alone"))
    for ranks, steps in ((first, 6), (3 - first, 12)):
        if ranks == 1:
            runs_alone(argv_of(flags, steps=steps))
            continue
        log = run_on(2, argv_of(flags, flags_of_two, steps=steps))
        assert log.count(f"step {steps}/{steps}") == 1
        assert "settings differ" not in log
        assert log.count(f"step {steps} continues") == 1
    assert_same_losses(tmp_path / "alone", tmp_path / "run", steps=12)


# Random loops; an epoch every few steps, which clears the tables; dropout from the second epoch on;
# an evaluation smaller than ranks x batch.
ALL = (
    "--global_batch 768 --eval_tokens 96 --random_loops --engram_reset --dropout 0.2 "
    f"--no_gradient_checkpointing --set {HALVED}"
)
FEW = f"--global_batch 256 --eval_every 0 --set {SMALL}"
WORDS = f"--global_batch 64 --seq_len 4 --eval_tokens 96 --set {SMALL},boundaries=words"


@pytest.mark.parametrize(
    "ranks, split, steps, flags",
    (
        # Few steps, because at the start almost nothing is unpooled, and normalization before the
        # core's own loss amplifies rounding.
        (2, 2, 6, f"{FEW},boundaries=learned,segment_offsets=3,core_loss_weight=0.2"),
        # Most sequences of four bytes have no segment.
        pytest.param(4, 2, 12, WORDS, marks=pytest.mark.slow),
        *(
            pytest.param(*layout, 20, f"{ALL} --optimizer {optimizer}", marks=pytest.mark.slow)
            for *layout, optimizer in ((3, 3, "muon"), (4, 1, "adamw"), (4, 2, "adamw8bit"))
        ),
    ),
)
def test_several_ranks_have_the_losses_of_one_rank(
    tmp_path, argv_of, run_on, ranks, split, steps, flags
):
    flags += " --precision fp32"
    runs_alone(argv_of(flags, steps=steps, ckpt="alone"))
    run_on(ranks, argv_of(flags, f"--shards {split}", steps=steps))
    assert_same_losses(tmp_path / "alone", tmp_path / "run", steps)


@pytest.mark.slow
def test_shards_splitting_a_block_of_8_bit_adamw_are_refused(argv_of, run_on):
    argv = argv_of(f"--optimizer adamw8bit --shards 3 --set {HALVED}")
    assert "a scale in 8-bit AdamW" in run_on(3, argv, status=2)


@pytest.mark.parametrize(
    "ranks, split, steps, optimizer",
    (
        (2, 1, 2, "muon"),
        (2, 2, 2, "adamw8bit"),
        pytest.param(4, 2, 12, "muon", marks=pytest.mark.slow),
    ),
)
def test_resumed_run_is_bitwise_equal_on_the_same_layout(
    tmp_path, argv_of, run_on, ranks, split, steps, optimizer
):
    flags = (
        f"--micro_batch 1 --shards {split} --optimizer {optimizer} --ckpt_every 3 --random_loops"
        f" --set {HALVED} {NO_EVAL}"
    )
    argvs = [
        argv_of(flags, steps=end, ckpt=name)
        for name, end in (("whole", steps), ("parts", steps // 2), ("parts", steps))
    ]
    assert run_on(ranks, *argvs).count("resuming from") == 1
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


# --------------------------------------------------------------------------------------------------
# NCCL's rules

SUM = Collective("allreduce", (0, 1), ("float32",), (8,), ("cpu",), (True,), {"reduce_op": 0})
EVEN = {"input_split_sizes": [4, 4], "output_split_sizes": [4, 4]}
UNEVEN = {"input_split_sizes": [2, 6], "output_split_sizes": [4, 4]}
TO_ALL = Collective(
    "alltoall_base", (0, 1), ("bfloat16",) * 2, (8, 8), ("cpu",) * 2, (True,) * 2, EVEN
)
SEND = Collective("send", (0, 1), ("uint8",), (5,), ("cpu",), (True,), {"dst": 1, "batched": True})
RECEIVE = SEND._replace(name="recv", settings={"src": 0, "batched": True})


@pytest.mark.parametrize(
    "other, message",
    (
        ([TO_ALL, SUM, RECEIVE], "not the same"),
        ([SUM, TO_ALL, RECEIVE._replace(sizes=(6,))], "receives"),
        ([SUM._replace(sizes=(9,)), TO_ALL, RECEIVE], "sizes"),
        ([SUM, TO_ALL._replace(settings=UNEVEN), RECEIVE], "sent"),
    ),
)
def test_invalid_nccl_calls_are_found(other, message):
    calls = [SUM, TO_ALL, SEND]
    assert message in disagreements([calls, other])[0]
    assert not disagreements([calls, [SUM, TO_ALL, RECEIVE]])
    assert not SUM.faults("cpu")
    assert SUM.faults("cuda") and SUM._replace(dtypes=("uint16",)).faults("cpu")


def in_bf16(_):
    """Let Muon multiply in bf16, as on a GPU."""
    optim.has_bf16 = lambda device: True


@pytest.mark.slow
def test_all_ranks_call_the_same_collectives(tmp_path, argv_of, run_on):
    """Two steps, then two more after resuming, both with an evaluation, a sample and a checkpoint.
    rehearsal/test_collectives.py records other layouts and optimizers, on fake GPUs."""
    flags = (
        "--shards 3 --optimizer muon --micro_batch 1 --grad_accum 2 --engram_reset "
        "--sample_every 2 --eval_every 2 --ckpt_every 2"
    )
    argvs = [argv_of(flags, steps=steps) for steps in (2, 4)]
    records = [tmp_path / f"rank{rank}.jsonl" for rank in range(3)]
    faults = [(in_bf16, rank, None) for rank in range(3)]
    faults += [(record_to_file, rank, str(record)) for rank, record in enumerate(records)]
    run_on(3, *argvs, faults=faults)
    calls = [recorded(record) for record in records]
    assert "recv" in {one.name for one in calls[0]}
    assert not disagreements(calls)
    for of_rank in calls:
        assert not [one for one in of_rank if one.faults("cpu")]


# --------------------------------------------------------------------------------------------------
# Stops and faults


def test_nan_on_one_rank_skips_the_step_on_all_ranks(tmp_path, argv_of, run_on):
    log = run_on(2, argv_of("--shards 2", NO_EVAL, steps=4), faults=[(nan, 1, 2)])
    assert [line["skipped"] for line in metrics(tmp_path / "run")] == [False, False, True, False]
    assert log.count("step 3 skipped") == 1


def test_signal_to_one_rank_stops_all_ranks_after_the_same_step(tmp_path, argv_of, run_on):
    """The next run does the evaluation due at that step. Ranks leave the process group, also after
    commands with no step left, even if settings differ."""
    argv = argv_of("--eval_every 5", steps=100)
    log = run_on(2, argv, faults=[(signalled, 1, 4)], status=STOPPED)
    assert len(last_lines(log)) == 1 and IN_GROUP not in log, log
    assert "SIGTERM: stopped after step 5" in log
    assert final_state(tmp_path / "run")["step"] == len(metrics(tmp_path / "run")) == 5
    ends = [*argv, "--max_steps", "5"]
    log = run_on(2, ends, ends, [*ends, "--lr", "0.5"], status=2)
    assert log.count("validation: bpb") == log.count("nothing left to train") == 1, log
    (line,) = last_lines(log)
    assert "settings differ: lr was" in line


@pytest.mark.slow
def test_rank_out_of_memory_logs_one_line(tmp_path, argv_of, processes):
    """A lost connection or torchrun ends the other ranks; the last checkpoint stays."""
    argv = argv_of("--ckpt_every 2 --rank_timeout 20", steps=100)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(out_of_memory, 1, 3)]).end()
    assert statuses[1] == 2 and statuses[0], log
    (line,) = last_lines(log)
    assert "out of memory" in line
    assert final_state(tmp_path / "run")["step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("number, to_all", ((signal.SIGTERM, False), (signal.SIGINT, True)))
def test_signal_to_torchrun_or_to_all_processes_saves_every_step(tmp_path, argv_of, number, to_all):
    """torchrun forwards a signal to its ranks. A terminal sends Ctrl-C to all processes."""
    directory = tmp_path / "run"
    job = torchrun(argv_of(NO_EVAL, steps=100_000))
    until(lambda: steps_done(directory) > 2)
    ranks = workers(directory)
    assert len(ranks) == 2
    for pid in [*(ranks if to_all else ()), job.pid]:
        os.kill(pid, number)
    _, log = job.communicate(timeout=LIMIT)
    assert sum("stopped after step" in line for line in last_lines(log)) == 1, log
    assert final_state(directory)["step"] == len(metrics(directory))
    until(lambda: not workers(directory), 60)


def test_rank_orphaned_during_imports_stops_before_the_first_step(argv_of, run_on):
    log = run_on(1, argv_of(), TORCHELASTIC_RUN_ID="x", status=STOPPED)
    assert "stopped before the first step" in log


@pytest.mark.slow
def test_run_is_bitwise_equal_after_a_rank_and_torchrun_are_killed(tmp_path, argv_of):
    """torchrun restarts the ranks. When torchrun dies, they save and stop, and the same command
    resumes."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = "--ckpt_every 5 --shards 2 --eval_every 40"
    end_well(torchrun(argv_of(flags, steps=100, ckpt="whole")))
    argv = argv_of(flags, steps=100, ckpt="killed")
    job = torchrun(argv, "--max-restarts", "1")
    until((killed / "spider-step5.pt").exists)
    os.kill(workers(killed)[1], signal.SIGKILL)
    until(lambda: steps_done(killed) >= 40)
    job.kill()
    _, log = job.communicate(timeout=LIMIT)  # returns when no rank holds stderr
    until(lambda: not workers(killed), 60)
    assert log.count("resuming from") == log.count("SIGTERM: stopped after step") == 1, log
    assert 40 <= final_state(killed)["step"] == len(metrics(killed)) < 100
    end_well(torchrun(argv))
    assert_same_runs(whole, killed)


def test_full_disk_fails_all_ranks_at_the_end_and_keeps_old_checkpoints(
    train_small, argv_of, run_on
):
    """The kernel stops files at 100 kB; a checkpoint is larger."""
    directory = train_small(NO_EVAL, steps=1)
    before = (directory / "spider-step1.pt").read_bytes()
    argv = argv_of("--ckpt_every 3", NO_EVAL, steps=5)
    log = run_on(2, argv, faults=[(file_limit, 0, 100_000)], status=2)
    assert len(metrics(directory)) == 5
    (line,) = last_lines(log)
    assert "free some disk space" in line and "resumes from the newest checkpoint there" in line
    assert re.search("CHECKPOINT NOT SAVED: .*: File too large", log)
    assert [path.read_bytes() for path in directory.glob("*.pt")] == [before]
    assert not list(directory.glob(".*.tmp"))


@pytest.mark.slow
def test_all_ranks_refuse_an_unusable_optimizer_state_in_one_line(
    tmp_path, train_small, argv_of, run_on
):
    """No rank waits for the others."""
    flags = f"--optimizer adamw {NO_EVAL}"
    state = final_state(train_small(flags, steps=1, ckpt="whole"))
    values = state["optimizer_state_dict"]["adamw"]["state"][0]
    values["exp_avg"] = values["exp_avg"].to_sparse()
    crafted = tmp_path / "crafted.pt"
    torch.save(state, crafted)
    (line,) = last_lines(run_on(2, argv_of(flags, "--resume", crafted, steps=2), status=2))
    assert "error: " in line
