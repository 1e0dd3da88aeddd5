"""Several ranks under gloo: the numbers of one rank on any layout, one checkpoint for all, stops
and faults."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collectives import Collective, disagreements, record_to_file, recorded
from conftest import SMALL, assert_same_runs, final_state, make_shards, metrics, refused, run_flags
from jobs import (
    IN_GROUP,
    LIMIT,
    Job,
    assert_same_losses,
    child_of_torchrun,
    full_disk,
    last_lines,
    late,
    nan,
    out_of_memory,
    reserve_port,
    runs_alone,
    signalled,
    signalled_twice,
    steps_done,
    torchrun,
    until,
    workers,
)
from spider import optim
from spider.checkpoint import find_checkpoints
from spider.common import SpiderError, WorldError
from spider.distributed import World


def test_ranks_that_cannot_be_arranged_are_an_error():
    environ = dict(
        RANK="0",
        WORLD_SIZE="4",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="4",
        MASTER_ADDR="here",
        MASTER_PORT="1",
    )
    with pytest.raises(WorldError, match="--shards 3 does not divide 4 ranks"):
        World(environ).join(torch.device("cpu"), 3, 1.0)
    with pytest.raises(WorldError, match="--shards 2 does not divide 1 ranks"):
        World({}).join(torch.device("cpu"), 2, 1.0)
    with pytest.raises(WorldError, match="rank 1 of 4 cannot reach the others"):
        World(environ | dict(RANK="1", MASTER_ADDR="127.0.0.1")).join(torch.device("cpu"), 1, 1.0)


@pytest.mark.parametrize(
    "environ, words",
    (
        (dict(RANK="3"), "RANK=3, WORLD_SIZE is not set"),
        (dict(RANK="abc"), "RANK=abc is not a whole number"),
        (dict(RANK="-1", WORLD_SIZE="2"), "RANK=-1"),
        (dict(RANK="2", WORLD_SIZE="2"), "RANK=2, WORLD_SIZE=2"),
        (dict(WORLD_SIZE="two"), "WORLD_SIZE=two"),
        (dict(WORLD_SIZE="2"), "RANK is not set, WORLD_SIZE=2"),
        (dict(RANK="0", WORLD_SIZE="0"), "WORLD_SIZE=0"),
        (dict(WORLD_SIZE="9" * 20), "is not a whole number"),
        (dict(LOCAL_RANK="1"), "LOCAL_WORLD_SIZE is not set"),
        (dict(LOCAL_WORLD_SIZE="2"), "LOCAL_RANK is not set"),
        (dict(LOCAL_RANK="2", LOCAL_WORLD_SIZE="2"), "LOCAL_RANK=2"),
    ),
)
def test_variables_of_ranks_that_contradict_one_another_are_refused_in_a_line(
    tmp_path, monkeypatch, capsys, environ, words
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    line = refused(
        ["--mock_data", "--dry_run", "--model", "tiny", "--ckpt_dir", tmp_path / "run"], capsys
    )
    assert words in line and "torchrun" in line and not list(tmp_path.iterdir())


def test_ranks_without_an_address_to_meet_at_are_told_so():
    with pytest.raises(
        WorldError, match="MASTER_ADDR expected, but not set.*: start all with torchrun"
    ):
        World(dict(RANK="0", WORLD_SIZE="2")).join(torch.device("cpu"), 1, 1.0)


def join_on_gpus(
    monkeypatch, own: list[str], visible: int, local_ranks: list[int]
) -> list[tuple[torch.device, str]]:
    """Let ranks join in threads of this process; return the device and the error of each. `own`:
    the uuid of each rank's GPU. Without CUDA they get no further than NCCL."""
    own_gpu = threading.local()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=own_gpu.uuid)
    )

    def join(rank: int) -> tuple[torch.device, str]:
        own_gpu.uuid = own[rank]
        world = World(
            dict(
                RANK=str(rank),
                WORLD_SIZE=str(len(own)),
                LOCAL_RANK=str(local_ranks[rank]),
                LOCAL_WORLD_SIZE=str(len(own)),
            )
        )
        with pytest.raises(SpiderError) as fault:
            world.join(torch.device("cuda"), 1, 20.0)
        return world.device, str(fault.value)

    with reserve_port() as reserved, ThreadPoolExecutor(len(own)) as pool:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(reserved.getsockname()[1]))
        return list(pool.map(join, range(len(own))))


@pytest.mark.skipif(torch.cuda.is_available(), reason="would start NCCL")
def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one_that_it_sees(monkeypatch):
    for visible, indices in ((4, [0, 1, 2]), (1, [0, 0, 0])):
        joined = join_on_gpus(monkeypatch, ["GPU-a", "GPU-b", "GPU-c"], visible, [0, 1, 2])
        assert [device.index for device, _ in joined] == indices
        assert all("share" not in fault for _, fault in joined)  # but that there is no NCCL here


def test_ranks_that_share_a_gpu_are_all_told_which_before_nccl_starts(monkeypatch):
    joined = join_on_gpus(monkeypatch, ["GPU-a", "GPU-b", "GPU-a"], 2, [0, 1, 2])
    assert {fault.partition(":")[0] for _, fault in joined} == {"ranks 0, 2 of 3 would share GPUs"}


def test_one_process_has_no_process_group_and_agrees_with_itself():
    world = World({})
    world.join(torch.device("cpu"), 1, 1.0)
    assert not torch.distributed.is_initialized() and world.all(True) and not world.all(False)
    world.leave()


# --------------------------------------------------------------------------------------------------
# The numbers of one rank

CASES = {  # flags, and those that only several ranks get
    "replicated": (("--optimizer", "muon", "--random_loops"), ()),
    "sharded": (
        ("--optimizer", "adamw", "--engram_reset"),
        ("--shards", "2", "--sample_every", "6"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_resume_from_one_and_one_from_two_with_the_same_losses(
    tmp_path, shards, processes, case
):
    """Six steps on one rank, then six on two, and the other way round, against twelve on one; by
    --global_batch."""
    flags, of_ranks = CASES[case]
    make_shards(tmp_path / "other")
    flags = (
        *flags,
        "--global_batch",
        "128",
        "--precision",
        "fp32",
        "--data_dir",
        f"{shards}:0.7,{tmp_path / 'other'}:0.3",
        "--ckpt_every",
        "6",
        "--eval_every",
        "6",
    )
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=12))
    for name, first in (("from one", 1), ("from two", 2)):
        for ranks, steps in ((first, 6), (3 - first, 12)):
            argv = run_flags(shards, tmp_path / name, *flags, *of_ranks * (ranks > 1), steps=steps)
            if ranks == 1:
                runs_alone(argv)
                continue
            statuses, log = Job(processes, tmp_path, ranks, argv).end()
            assert statuses == [0, 0], log
            assert log.count(f"step {steps}/{steps}") == 1 and "settings differ" not in log
            assert log.count(f"step {steps} continues") == ("--sample_every" in argv)
        assert_same_losses(tmp_path / "alone", tmp_path / name, steps=12)
        one, other = (final_state(tmp_path / part) for part in ("alone", name))
        assert one.keys() == other.keys() and one["flags"] == other["flags"]
        assert {k: v.shape for k, v in one["model_state_dict"].items()} == {
            k: v.shape for k, v in other["model_state_dict"].items()
        }


@pytest.mark.slow
@pytest.mark.parametrize("ranks, split", ((2, 2), (3, 3), (4, 1), (4, 2)))
@pytest.mark.parametrize("optimizer", ("muon", "adamw", "adamw8bit"))
def test_any_layout_gives_the_losses_of_one_rank_over_twenty_steps(
    tmp_path, shards, processes, ranks, split, optimizer
):
    """Random loops, an epoch every few steps that clears the tables, dropout from the second on, an
    evaluation smaller than ranks x batch. Three shards would split blocks of 8-bit AdamW here:
    refused."""
    flags = (
        "--optimizer",
        optimizer,
        "--random_loops",
        "--engram_reset",
        "--dropout",
        "0.2",
        "--precision",
        "fp32",
        "--global_batch",
        "768",
        "--eval_tokens",
        "96",
        "--no_gradient_checkpointing",
    )
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=20))
    argv = run_flags(shards, tmp_path / "ranks", *flags, "--shards", str(split), steps=20)
    statuses, log = Job(processes, tmp_path, ranks, argv).end()
    if optimizer == "adamw8bit" and split > 2:
        assert statuses == [2] * ranks and "a scale in 8-bit AdamW" in log, log
        return
    assert statuses == [0] * ranks, log
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks")


@pytest.mark.parametrize("rule", ("words", "learned"))
def test_boundaries_segment_offsets_and_the_cores_own_loss_are_those_of_one_rank(
    tmp_path, shards, processes, rule
):
    """Few steps: at the start almost nothing is unpooled, and the norm of the core's own loss
    amplifies rounding."""
    flags = (
        "--precision",
        "fp32",
        "--global_batch",
        "256",
        "--eval_every",
        "0",
        "--set",
        f"{SMALL},boundaries={rule},segment_offsets=3,"
        f"core_loss_weight={0.2 if rule == 'words' else 0}",
    )
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=6))
    argv = run_flags(shards, tmp_path / "ranks", *flags, "--shards", "2", steps=6)
    statuses, log = Job(processes, tmp_path, 2, argv).end()
    assert statuses == [0] * 2, log
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks", 6)
    one, other = (final_state(tmp_path / name)["model_state_dict"] for name in ("alone", "ranks"))
    for name in ("pairs", "entropy", "steps") if rule == "learned" else ():
        assert torch.equal(one[f"boundary_predictor.{name}"], other[f"boundary_predictor.{name}"])


@pytest.mark.slow
def test_a_batch_without_a_segment_on_one_rank_neither_hangs_nor_changes_losses(
    tmp_path, processes
):
    """For 12 steps: in the second epoch this text is known by heart, and rounding decides the rest
    of the loss."""
    directory = tmp_path / "data"
    directory.mkdir()
    ids = np.full(4000, 97, "<u2")
    ids[::300] = 32  # with sequences of 32 bytes, most rows have no segment at all
    ids.tofile(directory / "train.bin")
    flags = ("--set", f"{SMALL},boundaries=words", "--precision", "fp32", "--global_batch", "256")
    runs_alone(run_flags(directory, tmp_path / "alone", *flags, steps=12))
    argv = run_flags(directory, tmp_path / "ranks", *flags, "--shards", "2", steps=12)
    statuses, log = Job(processes, tmp_path, 4, argv).end()
    assert statuses == [0] * 4, log
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks", 12)


@pytest.mark.parametrize(
    "ranks, split, steps, optimizer",
    (
        (2, 1, 2, "muon"),
        (2, 2, 2, "adamw8bit"),
        *(pytest.param(4, split, 12, "muon", marks=pytest.mark.slow) for split in (2, 4)),
    ),
)
def test_on_the_same_layout_a_stopped_run_resumes_bit_for_bit(
    tmp_path, shards, processes, ranks, split, steps, optimizer
):
    flags = (
        "--micro_batch",
        "1",
        "--shards",
        str(split),
        "--optimizer",
        optimizer,
        "--ckpt_every",
        "3",
        "--random_loops",
        "--eval_every",
        "0",
    )
    argvs = [
        run_flags(shards, tmp_path / name, *flags, steps=end)
        for name, end in (("whole", steps), ("parts", steps // 2), ("parts", steps))
    ]
    statuses, log = Job(processes, tmp_path, ranks, *argvs).end()
    assert statuses == [0] * ranks and log.count("resuming from") == 1, log
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


# --------------------------------------------------------------------------------------------------
# The rules of NCCL

SUM = Collective("allreduce", (0, 1), ("float32",), (8,), ("cpu",), (True,), {"reduce_op": 0})
TO_ALL = Collective(
    "alltoall_base",
    (0, 1),
    ("bfloat16",) * 2,
    (8, 8),
    ("cpu",) * 2,
    (True,) * 2,
    {"input_split_sizes": [4, 4], "output_split_sizes": [4, 4]},
)
SEND = Collective("send", (0, 1), ("uint8",), (5,), ("cpu",), (True,), {"dst": 1, "batched": True})
RECEIVE = SEND._replace(name="recv", settings={"src": 0, "batched": True})


@pytest.mark.parametrize(
    "other, words",
    (
        ([TO_ALL, SUM, RECEIVE], "not the same"),
        ([SUM, RECEIVE], "not the same"),
        ([SUM, TO_ALL], "receives"),
        ([SUM, RECEIVE, TO_ALL], "receives"),
        ([SUM, TO_ALL, RECEIVE._replace(sizes=(6,))], "receives"),
        ([SUM, TO_ALL, RECEIVE._replace(dtypes=("int8",))], "receives"),
        ([SUM._replace(dtypes=("float64",)), TO_ALL, RECEIVE], "dtypes"),
        ([SUM._replace(sizes=(9,)), TO_ALL, RECEIVE], "sizes"),
        ([SUM._replace(group=(0, 1, 2)), TO_ALL, RECEIVE], "not the same"),
        ([SUM._replace(group=(1, 2)), TO_ALL, RECEIVE], "in the group"),
        ([SUM._replace(settings={"reduce_op": 1}), TO_ALL, RECEIVE], "settings"),
        ([SUM, TO_ALL._replace(dtypes=("float32",) * 2), RECEIVE], "dtypes"),
        (
            [
                SUM,
                TO_ALL._replace(
                    settings={"input_split_sizes": [2, 6], "output_split_sizes": [4, 4]}
                ),
                RECEIVE,
            ],
            "sent",
        ),
    ),
)
def test_each_breach_of_nccls_rules_is_found(other, words):
    assert not disagreements([[SUM, TO_ALL, SEND], [SUM, TO_ALL, RECEIVE]])
    assert words in disagreements([[SUM, TO_ALL, SEND], other])[0]
    assert not SUM.faults("cpu") and SUM.faults("cuda")
    assert SUM._replace(dtypes=("uint16",)).faults("cpu") and SUM._replace(
        contiguous=(False,)
    ).faults("cpu")
    assert not SEND.faults("cpu") and SEND._replace(settings={"dst": 1, "batched": False}).faults(
        "cpu"
    )


def in_bf16(_):
    """Muon's products are in bf16, as on a GPU."""
    optim.multiplies_bf16 = lambda device: True


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, split, optimizer",
    ((2, 1, "muon"), (2, 2, "muon"), (3, 3, "muon"), (4, 2, "muon"), (4, 2, "adamw8bit")),
)
def test_all_ranks_call_the_same_collectives_as_nccl_demands(
    tmp_path, shards, processes, ranks, split, optimizer
):
    """In two steps, and in two more of a run that resumes, with an evaluation, a sample and a
    checkpoint of each."""
    flags = (
        "--shards",
        str(split),
        "--optimizer",
        optimizer,
        "--micro_batch",
        "1",
        "--grad_accum",
        "2",
        "--sample_every",
        "2",
        "--eval_every",
        "2",
        "--ckpt_every",
        "2",
        "--engram_reset",
    )
    argvs = [run_flags(shards, tmp_path / "run", *flags, steps=steps) for steps in (2, 4)]
    logs = [tmp_path / f"rank{rank}.jsonl" for rank in range(ranks)]
    faults = [(record_to_file, rank, str(log)) for rank, log in enumerate(logs)]
    faults += [(in_bf16, rank, None) for rank in range(ranks)]
    statuses, log = Job(processes, tmp_path, ranks, *argvs, faults=faults).end()
    assert statuses == [0] * ranks, log
    calls = [recorded(log) for log in logs]
    assert ("recv" in {one.name for one in calls[0]}) == (split > 1)
    assert not disagreements(calls)
    assert not [fault for one in sum(calls, []) for fault in one.faults("cpu")]


# --------------------------------------------------------------------------------------------------
# Stops and faults


def test_nan_on_one_rank_skips_the_step_on_all(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--shards", "2", "--eval_every", "0", steps=4)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(nan, 1, 2)]).end()
    assert statuses == [0, 0], log
    assert [line["skipped"] for line in metrics(tmp_path / "run")] == [False, False, True, False]
    assert log.count("step 3 skipped") == 1


@pytest.mark.slow
def test_ranks_that_diverge_end_with_one_line_and_leave_their_group(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--max_skipped", "1", "--eval_every", "0", steps=4)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(nan, 1, 2)]).end()
    assert statuses == [1, 1] and len(last_lines(log)) == 1 and IN_GROUP not in log, log


@pytest.mark.parametrize("victim", (0, 1))
def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_one_line(
    tmp_path, shards, processes, victim
):
    """Instead of the evaluation that is due then, which the next run catches up on. All leave their
    group."""
    argv = run_flags(shards, tmp_path / "run", "--eval_every", "5", steps=100)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(signalled, victim, 4)]).end()
    assert statuses == [143, 143] and len(last_lines(log)) == 1 and IN_GROUP not in log, log
    assert "SIGTERM: stopped after step 5" in log
    assert final_state(tmp_path / "run")["step"] == len(metrics(tmp_path / "run")) == 5


@pytest.mark.slow
@pytest.mark.parametrize("victim", (0, 1))
def test_a_rank_that_runs_out_of_memory_says_so_in_one_line(tmp_path, shards, processes, victim):
    """The others end by a lost connection, or by torchrun; the last checkpoint stays."""
    argv = run_flags(
        shards, tmp_path / "run", "--ckpt_every", "2", "--rank_timeout", "20", steps=100
    )
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(out_of_memory, victim, 3)]).end()
    assert statuses[victim] == 2 and 0 not in statuses, log
    assert len(last_lines(log)) == 1 and "out of memory" in last_lines(log)[0]
    assert final_state(tmp_path / "run")["step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, whom",
    (
        (signal.SIGTERM, "one"),
        (signal.SIGTERM, "all"),
        (signal.SIGTERM, "torchrun"),
        (signal.SIGINT, "torchrun"),
    ),
)
def test_a_signal_to_one_all_or_torchrun_saves_every_step_that_was_done(
    tmp_path, shards, number, whom
):
    directory = tmp_path / "run"
    job = torchrun(run_flags(shards, directory, "--eval_every", "0", steps=100_000))
    until(lambda: steps_done(directory) > 2)
    pids = workers(directory)
    assert len(pids) == 2
    for pid in {"one": pids[1:], "all": [*pids, job.pid], "torchrun": [job.pid]}[whom]:
        os.kill(pid, number)
    _, log = job.communicate(timeout=LIMIT)
    assert sum("stopped after step" in line for line in last_lines(log)) == 1, log
    assert final_state(directory)["step"] == len(metrics(directory))
    until(lambda: not workers(directory), 60)


def test_the_only_rank_of_torchrun_saves_though_a_signal_to_both_reaches_it_twice(
    tmp_path, shards, processes
):
    job = Job(
        processes,
        tmp_path,
        1,
        run_flags(shards, tmp_path / "run", steps=100),
        TORCHELASTIC_RUN_ID="x",
        faults=[(child_of_torchrun, 0, None), (signalled_twice, 0, 4)],
    )
    statuses, log = job.end()
    assert statuses == [143], log
    assert final_state(tmp_path / "run")["step"] == 5


def test_a_rank_whose_torchrun_died_while_it_imported_torch_stops_before_the_first_step(
    tmp_path, shards, processes
):
    job = Job(
        processes,
        tmp_path,
        1,
        run_flags(shards, tmp_path / "run", steps=100),
        TORCHELASTIC_RUN_ID="x",
    )
    statuses, log = job.end()
    assert statuses == [143] and "stopped before the first step" in log, log


FLAGS_OF_KILLED = ("--ckpt_every", "5", "--shards", "2", "--eval_every", "40")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Data, and a run of 60 steps on it under torchrun."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    shards, run = make_shards(directory / "data"), directory / "run"
    job = torchrun(run_flags(shards, run, *FLAGS_OF_KILLED, steps=60))
    _, log = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, log
    return shards, run


@pytest.mark.slow
def test_torchrun_restarts_a_killed_worker_and_the_run_ends_like_an_uninterrupted_one(
    tmp_path, uninterrupted
):
    (shards, whole), killed = uninterrupted, tmp_path / "killed"
    job = torchrun(run_flags(shards, killed, *FLAGS_OF_KILLED, steps=60), "--max-restarts", "1")
    until(lambda: (killed / "spider-step5.pt").exists())
    os.kill(workers(killed)[1], signal.SIGKILL)
    _, log = job.communicate(timeout=LIMIT)
    assert job.returncode == 0 and "resuming from" in log, log
    assert [line["step"] for line in metrics(killed)] == list(range(1, 61))
    assert_same_runs(whole, killed)


@pytest.mark.slow
def test_ranks_of_a_killed_torchrun_save_and_stop_and_the_run_ends_like_an_uninterrupted_one(
    tmp_path, uninterrupted
):
    (shards, whole), killed = uninterrupted, tmp_path / "killed"
    argv = run_flags(shards, killed, *FLAGS_OF_KILLED, steps=60)
    job = torchrun(argv)
    until(lambda: steps_done(killed) >= 7)
    job.kill()
    _, log = job.communicate(timeout=LIMIT)  # until no rank is left that could write
    until(lambda: not workers(killed), 60)
    assert log.count("SIGTERM: stopped after step") == 1, log
    assert 7 <= final_state(killed)["step"] == len(metrics(killed)) < 60
    job = torchrun(argv)
    _, log = job.communicate(timeout=LIMIT)
    assert job.returncode == 0 and "resuming from" in log, log
    assert_same_runs(whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize("failing, statuses, saved", ((3, [0, 0], [6, 8]), (100, [2, 2], [])))
def test_a_full_disk_on_rank_0_stops_nobody_and_at_the_end_is_one_line(
    tmp_path, shards, processes, failing, statuses, saved
):
    argv = run_flags(shards, tmp_path / "run", "--ckpt_every", "3", "--eval_every", "0", steps=8)
    found, log = Job(processes, tmp_path, 2, argv, faults=[(full_disk, 0, failing)]).end()
    assert found == statuses and "CHECKPOINT NOT SAVED" in log, log
    assert [one.step for one in find_checkpoints(tmp_path / "run")] == saved
    assert len(last_lines(log)) == (not saved) and ("make room" in log) == (not saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    (
        lambda one: one.update(exp_avg=torch.zeros(()).expand(one["exp_avg"].shape)),
        lambda one: one.pop("exp_avg_sq"),
        lambda one: one["step"].fill_(-1),
    ),
)
def test_ranks_refuse_a_crafted_optimizer_state_together_in_one_line(
    tmp_path, shards, processes, damage
):
    """None waits for the others: ranks without the file know only dtypes and shapes of its
    tensors."""
    runs_alone(
        run_flags(shards, tmp_path / "whole", "--optimizer", "adamw", "--eval_every", "0", steps=1)
    )
    state = final_state(tmp_path / "whole")
    damage(state["optimizer_state_dict"]["adamw"]["state"][0])
    torch.save(state, tmp_path / "crafted.pt")
    argv = run_flags(
        shards,
        tmp_path / "run",
        "--optimizer",
        "adamw",
        "--resume",
        tmp_path / "crafted.pt",
        steps=2,
    )
    statuses, log = Job(processes, tmp_path, 2, [*map(str, argv)]).end(60)
    assert statuses == [2, 2] and len(last_lines(log)) == 1 and "error: " in last_lines(log)[0], log


@pytest.mark.slow
def test_ranks_wait_for_one_that_starts_late(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--rank_timeout", "60", "--eval_every", "0", steps=2)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(late, 1, 20)]).end()
    assert statuses == [0, 0], log


@pytest.mark.slow
def test_a_second_job_in_the_same_directory_is_refused_once(tmp_path, shards, processes):
    argv = run_flags(
        shards, tmp_path / "run", "--ckpt_every", "2", "--rank_timeout", "20", steps=100_000
    )
    first = Job(processes, tmp_path, 2, argv)
    until(lambda: steps_done(tmp_path / "run") > 1)
    statuses, log = Job(processes, tmp_path, 2, argv).end()
    assert (
        0 not in statuses and len(last_lines(log)) == 1 and "another process is using it" in log
    ), log
    os.kill(first.ranks[1].pid, signal.SIGTERM)
    statuses, log = first.end()
    assert statuses == [143, 143] and len(last_lines(log)) == 1, log
