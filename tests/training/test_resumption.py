"""An interrupted run ends like an undisturbed one, to the bit, wherever it was interrupted."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, assert_same, final_state, metrics, run, run_flags
from runs import assert_same_runs

import train
from spider.model import surprise
from spider.training import optimizers

EVERY_KIND = (("--precision", "fp8", "--fp8_experts"), ("--optimizer", "adamw8bit"), ("--engram_reset",),
              ("--dropout", "0.3"))
ALSO = (("--recompute", "core"), ("--random_loops",), ("--grad_accum", "2"),
        ("--precision", "fp32", "--no_gradient_checkpointing"), ("--precision", "bf16"), ("--optimizer", "adamw"),
        ("--moe_backend", "loop"), ("--schedule", "wsd", "--target_tokens", "700"), ("--deterministic",))


@pytest.mark.parametrize("flags", (*EVERY_KIND, *(pytest.param(flags, marks=pytest.mark.slow) for flags in ALSO)),
                         ids=" ".join)
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, shards, flags):
    """24 steps of two sequences reach the third epoch of 20; a cut lies in each of the first two."""
    flags = ("--eval_every", "10", *flags)
    whole = run(tmp_path, shards, *flags, steps=24, ckpt="whole")
    for steps in (7, 14, 24):
        parts = run(tmp_path, shards, *flags, steps=steps, ckpt="parts")
    assert final_state(whole)["epoch"] >= 2 and final_state(whole)["step"] == 24
    assert_same_runs(whole, parts)


def test_every_step_can_be_the_one_where_a_run_is_interrupted(tmp_path, shards):
    flags = ("--random_loops", "--grad_accum", "2")
    whole = run(tmp_path, shards, *flags, steps=9, ckpt="whole")
    for steps in range(1, 10):
        parts = run(tmp_path, shards, *flags, steps=steps, ckpt="parts")
    assert_same_runs(whole, parts)


def test_learned_boundaries_resume_with_their_threshold(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(surprise, "TRUST", (2, 5))
    flags = ("--set", f"{SMALL},boundaries=learned", "--eval_every", "4")
    whole = run(tmp_path, shards, *flags, steps=12, ckpt="whole")
    for steps in (3, 7, 12):
        parts = run(tmp_path, shards, *flags, steps=steps, ckpt="parts")
    assert_same_runs(whole, parts)
    state = final_state(whole)["model_state_dict"]
    assert state["boundary_predictor.steps"] == 12 and state["boundary_predictor.threshold"] != 0


@pytest.fixture
def mixture(tmp_path, shards) -> str:
    """Of which an epoch is about 33 sequences of 32 bytes."""
    other = tmp_path / "other"
    other.mkdir()
    np.random.default_rng(1).choice(np.frombuffer(b"xyz ", np.uint8), 400).astype("<u2").tofile(other / "a.bin")
    return f"{shards}:0.6,{other}:0.4"


def test_a_mixture_resumes_exactly_in_each_sources_own_epoch(tmp_path, mixture):
    flags = ("--micro_batch", "4", "--eval_every", "8")
    whole = run(tmp_path, mixture, *flags, steps=20, ckpt="whole")
    for steps in (6, 11, 20):
        parts = run(tmp_path, mixture, *flags, steps=steps, ckpt="parts")
    assert final_state(whole)["epoch"] >= 2
    assert_same_runs(whole, parts)


def test_the_evaluation_at_an_end_that_a_run_went_past_stays_marked_and_counts_for_nothing(tmp_path, shards):
    for steps in (6, 8, 9):               # 8 is a multiple of --eval_every
        directory = run(tmp_path, shards, steps=steps)
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "val_loss" in line] == [n for n in (4, 6, 8, 9) if n <= steps]
        assert [line["step"] for line in lines if line.get("at_end")] == [6] * (steps > 6)
    assert_same_runs(run(tmp_path, shards, steps=9, ckpt="whole"), directory)


def test_tables_of_a_mixture_are_emptied_as_its_second_epoch_begins(tmp_path, mixture, monkeypatch):
    emptied, update = [], train.update
    monkeypatch.setattr(train, "update", lambda *args, empty_tables: (emptied.append(empty_tables), update(
        *args, empty_tables=empty_tables))[1])
    lines = metrics(run(tmp_path, mixture, "--engram_reset", "--eval_every", "0", steps=30))
    epochs = [line["epoch"] for line in lines]
    assert 13 < epochs.index(1) < 23 and epochs == sorted(epochs) and epochs[-1] == 1
    assert [step for step, empties in enumerate(emptied) if empties] == [epochs.index(1)]


def test_evaluating_sampling_and_saving_may_change_between_the_parts_of_a_run(tmp_path, shards):
    whole = run(tmp_path, shards, "--eval_every", "0", steps=12, ckpt="whole")
    for steps, flags in ((3, ("--eval_every", "1")), (7, ("--sample_every", "4", "--ckpt_every", "2")),
                         (12, ("--eval_every", "0"))):
        parts = run(tmp_path, shards, *flags, steps=steps, ckpt="parts")
    for part in ("model_state_dict", "optimizer_state_dict", "bytes_seen", "average_loss"):
        assert_same(final_state(whole)[part], final_state(parts)[part])


@pytest.mark.parametrize("before,after", (((3, 7), (1, 9)), ((2, 11), (4, 13)), ((2, 10), (3, 12))))
def test_tables_are_emptied_once_an_epoch_also_where_the_micro_batch_changes(tmp_path, shards, monkeypatch, before,
                                                                            after):
    """Sequence 20 begins the second epoch; the third lies beyond."""
    emptied, reset = [], optimizers.RowwiseAdagrad.reset
    monkeypatch.setattr(optimizers.RowwiseAdagrad, "reset", lambda tables: (emptied.append(1), reset(tables)))
    for micro_batch, steps in (before, after):
        run(tmp_path, shards, "--engram_reset", "--eval_every", "0", "--micro_batch", str(micro_batch), steps=steps)
    assert len(emptied) == 1


def test_a_first_step_of_an_epoch_that_is_dropped_leaves_the_tables_as_they_were(tmp_path, shards, monkeypatch):
    flags, accumulate, steps = ("--engram_reset", "--eval_every", "0"), train.accumulate, itertools.count(1)

    def failing(*args):
        if next(steps) == 11:
            raise MemoryError
        return accumulate(*args)
    monkeypatch.setattr(train, "accumulate", failing)
    assert train.command_line(run_flags(shards, tmp_path / "run", *flags, steps=15)) == 2
    monkeypatch.undo()
    assert_same(final_state(tmp_path / "run"), final_state(run(tmp_path, shards, *flags, steps=10, ckpt="whole")))
    assert_same_runs(run(tmp_path, shards, *flags, steps=15), run(tmp_path, shards, *flags, steps=15, ckpt="whole"))


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ((), ("--precision", "fp8"), ("--moe_backend", "grouped")), ids=" ".join)
def test_deterministic_runs_resume_exactly_on_a_gpu(tmp_path, shards, flags):
    flags = ("--device", "cuda", "--deterministic", "--dropout", "0.3", *flags)
    whole = run(tmp_path, shards, *flags, steps=20, ckpt="whole")
    for steps in (7, 20):
        parts = run(tmp_path, shards, *flags, steps=steps, ckpt="parts")
    assert_same_runs(whole, parts)


@pytest.mark.slow
def test_random_combinations_of_flags_and_interruptions_resume_exactly(tmp_path, shards):
    """Twelve draws from every flag that changes the arithmetic, the data or the loop, each cut at three steps."""
    generator = random.Random(0)
    choices = [("--random_loops",), ("--grad_accum", "3"), ("--no_gradient_checkpointing",), ("--engram_reset",),
               ("--schedule", "wsd", "--target_tokens", "900"), ("--seed", "5"), ("--micro_batch", "3"),
               ("--eval_every", "3"), ("--ckpt_every", "7"), ("--sample_every", "5"), ("--moe_backend", "loop"),
               ("--dropout", "0.3")]
    for case in range(12):
        flags = [word for choice in choices if generator.random() < 0.4 for word in choice]
        flags += ["--optimizer", generator.choice(("adamw", "adamw8bit", "muon")),
                  "--precision", generator.choice(("fp32", "bf16", "fp8"))]
        steps = generator.randint(20, 40)
        whole = run(tmp_path, shards, *flags, steps=steps, ckpt=f"whole{case}")
        for cut in sorted(generator.sample(range(1, steps), 3)) + [steps]:
            parts = run(tmp_path, shards, *flags, steps=cut, ckpt=f"parts{case}")
        assert_same_runs(whole, parts)


def test_a_resumed_run_keeps_nothing_of_its_checkpoint_mapped(tmp_path, shards, monkeypatch):
    run(tmp_path, shards, steps=1)
    maps, update = [], train.update

    def looking(*args, **options):
        maps.append(Path("/proc/self/maps").read_text())
        return update(*args, **options)
    monkeypatch.setattr(train, "update", looking)
    run(tmp_path, shards, steps=2)
    mapped, = ({Path(line.split()[-1]).name for line in seen.splitlines() if str(tmp_path) in line} for seen in maps)
    assert "train-0.bin" in mapped and not any(name.startswith("spider-step") for name in mapped)


def test_loops_of_a_run_stay_the_same_when_it_resumes_and_others_are_named(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--n_loops", "3", steps=1)
    flags = ["--data_dir", str(shards), "--seq_len", "32", "--micro_batch", "2", "--ckpt_dir", str(directory),
             "--eval_every", "0", "--device", "cpu"]
    assert train.command_line([*flags, "--max_steps", "2", "--n_loops", "5"]) == 0
    assert "--n_loops was 3, is 5" in capsys.readouterr().err
    assert train.command_line([*flags, "--max_steps", "3"]) == 0
    assert "--n_loops" not in capsys.readouterr().err
    state = final_state(directory)
    assert state["step"] == 3 and state["n_loops"] == 5 and state["cfg"]["n_loops"] == 3
