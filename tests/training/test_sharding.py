"""Sharded and replicated training: the numbers of one rank on any layout, and one checkpoint for all of them."""

import numpy as np
import pytest
import torch
from training.jobs import Job, assert_same_losses, drift, last_lines, nan, runs_alone, whole_width

from conftest import SMALL, assert_same, final_state, make_shards, metrics, run_flags

CASES = {                                 # flags, and those that only ranks get
    "replicated": (("--optimizer", "muon", "--random_loops"), ()),
    "sharded": (("--optimizer", "adamw", "--engram_reset"), ("--shards", "2", "--sample_every", "6")),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_resume_from_one_and_one_from_two_with_the_same_losses(tmp_path, shards, processes, case):
    """Six steps on one rank, then six on two, and the other way round, against twelve on one; by --global_batch."""
    flags, of_ranks = CASES[case]
    make_shards(tmp_path / "other")
    flags = (*flags, "--global_batch", "128", "--precision", "fp32", "--data_dir",
             f"{shards}:0.7,{tmp_path / 'other'}:0.3", "--ckpt_every", "6")
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=12))
    for name, first in (("from one", 1), ("from two", 2)):
        for ranks, steps in ((first, 6), (3 - first, 12)):
            argv = run_flags(shards, tmp_path / name, *flags, *of_ranks * (ranks > 1), steps=steps)
            if ranks == 1:
                runs_alone(argv)
            else:
                statuses, log = Job(processes, tmp_path, ranks, argv).end()
                assert statuses == [0, 0], log
                assert log.count(f"step {steps}/{steps}") == 1 and "settings differ" not in log
                assert log.count(f"step {steps} continues") == ("--sample_every" in argv)
        assert_same_losses(tmp_path / "alone", tmp_path / name, steps=12)
        one, other = (final_state(tmp_path / part) for part in ("alone", name))
        assert one.keys() == other.keys() and one["flags"] == other["flags"]
        assert {k: v.shape for k, v in one["model_state_dict"].items()} == {
            k: v.shape for k, v in other["model_state_dict"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks, split", ((2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4)))
@pytest.mark.parametrize("optimizer", ("muon", "adamw", "adamw8bit"))
def test_any_layout_gives_the_losses_of_one_rank_over_twenty_steps(tmp_path, shards, processes, ranks, split,
                                                                   optimizer):
    """Random loops, an epoch every few steps that empties the tables, dropout from the second on, an evaluation smaller
    than ranks x batch. Three or four shards would cut the blocks of 8-bit AdamW here: refused."""
    flags = ("--optimizer", optimizer, "--random_loops", "--engram_reset", "--dropout", "0.2", "--precision", "fp32",
             "--global_batch", "768", "--eval_tokens", "96", "--no_gradient_checkpointing")
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=20))
    argv = run_flags(shards, tmp_path / "ranks", *flags, "--shards", str(split), steps=20)
    statuses, log = Job(processes, tmp_path, ranks, argv).end()
    if optimizer == "adamw8bit" and split > 2:
        assert statuses == [2] * ranks and "a scale in 8-bit AdamW" in log, log
        return
    assert statuses == [0] * ranks, log
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks")


def test_words_segment_offsets_and_the_cores_own_loss_are_those_of_one_rank(tmp_path, shards, processes):
    """Few steps: at the start next to nothing is unpooled, and normed for the core's own loss its rounding grows."""
    flags = ("--precision", "fp32", "--global_batch", "256",
             "--set", f"{SMALL},boundaries=words,places=3,core_loss_weight=0.2")
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=6))
    statuses, log = Job(processes, tmp_path, 2, run_flags(shards, tmp_path / "ranks", *flags, "--shards", "2",
                                                           steps=6)).end()
    assert statuses == [0] * 2, log
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks", 6)


def test_learned_boundaries_are_those_of_one_rank(tmp_path, shards, processes):
    flags = ("--precision", "fp32", "--global_batch", "256", "--set", f"{SMALL},boundaries=learned,places=3")
    runs_alone(run_flags(shards, tmp_path / "alone", *flags, steps=8))
    statuses, log = Job(processes, tmp_path, 2, run_flags(shards, tmp_path / "ranks", *flags, "--shards", "2",
                                                           steps=8)).end()
    assert statuses == [0] * 2, log
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks", 8)
    one, other = (final_state(tmp_path / name)["model_state_dict"] for name in ("alone", "ranks"))
    for name in ("pairs", "entropy", "steps"):
        assert torch.equal(one[f"boundary_predictor.{name}"], other[f"boundary_predictor.{name}"])


@pytest.mark.slow
def test_a_batch_without_a_segment_on_one_rank_neither_hangs_nor_changes_losses(tmp_path, processes):
    """For 12 steps: in the second epoch this text is known by heart, and rounding decides what is left of the loss."""
    directory = tmp_path / "data"
    directory.mkdir()
    ids = np.full(4000, 97, "<u2")
    ids[::300] = 32                       # with sequences of 32 bytes, most rows have no segment at all
    ids.tofile(directory / "train.bin")
    flags = ("--set", f"{SMALL},boundaries=whitespace", "--precision", "fp32", "--global_batch", "256")
    runs_alone(run_flags(directory, tmp_path / "alone", *flags, steps=12))
    argv = run_flags(directory, tmp_path / "ranks", *flags, "--shards", "2", steps=12)
    statuses, log = Job(processes, tmp_path, 4, argv).end()
    assert statuses == [0] * 4, log
    assert_same_losses(tmp_path / "alone", tmp_path / "ranks", 12)


@pytest.mark.parametrize("ranks, split, steps, optimizer", (
    (2, 1, 2, "muon"), (2, 2, 2, "muon"), (2, 2, 2, "adamw8bit"),
    *(pytest.param(4, split, 12, "muon", marks=pytest.mark.slow) for split in (2, 4))))
def test_on_the_same_layout_a_stopped_run_goes_on_bit_for_bit(tmp_path, shards, processes, ranks, split, steps,
                                                              optimizer):
    flags = ("--micro_batch", "1", "--shards", str(split), "--optimizer", optimizer, "--ckpt_every", "3",
             "--random_loops", "--eval_every", "4" if steps > 2 else "0")
    argvs = [run_flags(shards, tmp_path / name, *flags, steps=end)
             for name, end in (("whole", steps), ("parts", steps // 2), ("parts", steps))]
    statuses, log = Job(processes, tmp_path, ranks, *argvs).end()
    assert statuses == [0] * ranks and log.count("resuming from") == 1, log
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    assert_same(final_state(tmp_path / "whole"), final_state(tmp_path / "parts"))


@pytest.mark.parametrize("precision", ("bf16", pytest.param("fp8", marks=pytest.mark.slow)))
def test_weights_gathered_in_bf16_give_the_bits_of_those_gathered_in_fp32(tmp_path, shards, processes, precision):
    """With one micro-step, where they are gathered twice, and in evaluations; both ranks are told not to in one run."""
    flags = ("--precision", precision, "--shards", "2", "--micro_batch", "1", "--eval_every", "2")
    for name, faults in (("halved", ()), ("whole", ((whole_width, 0, 0), (whole_width, 1, 0)))):
        statuses, log = Job(processes, tmp_path, 2, run_flags(shards, tmp_path / name, *flags, steps=3),
                             faults=faults).end()
        assert statuses == [0, 0], log
    assert metrics(tmp_path / "halved") == metrics(tmp_path / "whole")
    assert_same(final_state(tmp_path / "halved"), final_state(tmp_path / "whole"))


def test_nan_on_one_rank_skips_the_step_on_all(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--shards", "2", steps=4)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(nan, 1, 2)]).end()
    assert statuses == [0, 0], log
    assert [line["skipped"] for line in metrics(tmp_path / "run")] == [False, False, True, False]
    assert log.count("step 3 skipped") == 1


@pytest.mark.slow
def test_replicas_that_drift_apart_are_an_error_that_names_the_tensor(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--engram_reset", "off", "--eval_every", "0", steps=200)
    statuses, log = Job(processes, tmp_path, 2, argv, faults=[(drift, 1, 1)]).end()
    assert statuses == [2, 2], log
    (line,) = set(last_lines(log))       # of both, should the store go with rank 0, its host, before the other asks
    assert "engram_input.table.weight is no longer the same on all ranks" in line
