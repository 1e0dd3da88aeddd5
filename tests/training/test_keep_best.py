"""--keep_best, --patience and --log_every: the best checkpoint stays, a run in vain ends, both exact under
resumption."""

import math
import shutil

import pytest

import sample
import train
from conftest import assert_same, final_state, metrics, run, run_flags
from spider.errors import CheckpointError
from spider.training.checkpoint_loading import best_checkpoint
from spider.training.progress import RunProgress

FLAGS = ("--eval_every", "2", "--ckpt_every", "3", "--keep_best")


record = RunProgress.record_evaluation


@pytest.fixture(autouse=True)
def losses(monkeypatch):
    """Have evaluations find a given loss at each even step, whatever the weights, and 2.2 at the odd end of a run."""
    by_step = dict(zip(range(2, 22, 2), (3.0, 2.0, 2.5, 2.4, 1.0, 1.5, 1.4, 1.3, 1.2, 1.1)))
    monkeypatch.setattr(RunProgress, "record_evaluation", lambda progress, loss, at_end: record(
        progress, by_step.get(progress.step, 2.2), at_end))


def steps_of(directory) -> set[int]:
    return {int(path.stem[11:]) for path in directory.glob("spider-step*.pt")}


def assert_same_end(one, other):
    assert_same(final_state(one), final_state(other))
    assert metrics(one) == metrics(other)


@pytest.mark.parametrize("flags", ((), ("--sharded_checkpoints",)))
def test_the_checkpoint_of_the_lowest_validation_loss_stays_beside_the_newest_ones(tmp_path, shards, flags):
    """Steps 4 and 10 are the best ones so far, and no multiples of --ckpt_every."""
    directory = run(tmp_path, shards, *FLAGS, *flags, steps=9)
    assert best_checkpoint(directory).step == 4 and best_checkpoint(directory).val_loss == 2.0
    run(tmp_path, shards, *FLAGS, *flags, steps=18)
    assert {int(path.stem[11:]) for path in directory.glob("spider-step*")} == {10, 15, 18}
    assert best_checkpoint(directory).path.stem == "spider-step10"


def test_the_best_checkpoint_is_known_again_wherever_a_run_was_interrupted(tmp_path, shards):
    whole = run(tmp_path, shards, *FLAGS, steps=14, ckpt="whole")
    for steps in range(1, 15):
        parts = run(tmp_path, shards, *FLAGS, steps=steps, ckpt="parts")
        best = {1: 1, 2: 1, 3: 1}.get(steps, 4 if steps < 10 else 10)   # an end's evaluation counts as long as it leads
        assert best_checkpoint(parts).step == best and best in steps_of(parts) and len(steps_of(parts)) <= 3
    assert_same_end(whole, parts)


def test_without_keep_best_only_the_newest_stay_and_the_best_of_them_is_found(tmp_path, shards):
    directory = run(tmp_path, shards, *FLAGS[:-1], steps=18)
    assert steps_of(directory) == {15, 18} and best_checkpoint(directory).step == 18
    directory = run(tmp_path, shards, "--eval_every", "0", steps=3, ckpt="other")
    with pytest.raises(CheckpointError, match="no checkpoint in it was saved after an evaluation"):
        best_checkpoint(directory)


def test_a_run_that_went_back_has_a_best_checkpoint_of_its_own(tmp_path, shards):
    directory = run(tmp_path, shards, *FLAGS, "--keep_last", "9", steps=12)
    shutil.copy(directory / "spider-step9.pt", tmp_path / "origin.pt")
    run(tmp_path, shards, *FLAGS, "--resume", str(tmp_path / "origin.pt"), "--patience", "9", steps=17)
    assert best_checkpoint(directory).val_loss == 1.0 and final_state(directory)["lineage"] == 1


def test_a_run_ends_when_its_validation_has_not_improved_in_so_many_evaluations(tmp_path, shards, capsys):
    """Exit status 0; the same command again says why it does not train on; more patience does, to the same bits."""
    flags = ("--eval_every", "2", "--patience", "2")
    for steps in (5, 7, 100, 100):        # 2.5 and 2.4 at steps 6 and 8; the evaluation at 7 is the end's alone
        directory = run(tmp_path, shards, *flags, steps=steps)
        said = capsys.readouterr().err
        assert ("ended by --patience 2: the last 2 evaluations did not lower" in said) == (steps > 7)
        assert final_state(directory)["step"] == min(steps, 8)
    assert "step 9/" not in said and "done: step 8" in said
    assert_same_end(run(tmp_path, shards, *flags, steps=100, ckpt="whole"), directory)
    for patience in ("3", "0"):
        assert final_state(run(tmp_path, shards, "--eval_every", "2", "--patience", patience, steps=20))["step"] == {
            "3": 16, "0": 20}[patience]


def test_a_run_that_is_changed_has_its_patience_back(tmp_path, shards):
    flags = ("--eval_every", "2", "--patience", "2")
    run(tmp_path, shards, *flags, steps=100)
    assert final_state(run(tmp_path, shards, *flags, "--weight_decay", "0.3", steps=100))["step"] == 14


@pytest.mark.parametrize("flag", (("--keep_best",), ("--patience", "3")))
def test_what_goes_by_the_validation_loss_is_refused_without_evaluation(tmp_path, shards, capsys, flag):
    assert train.command_line(run_flags(shards, tmp_path / "run", "--eval_every", "0", *flag)) == 2
    assert f"{flag[0]} needs the validation loss" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_lines_of_the_log_are_as_few_as_log_every_says_and_metrics_has_every_step(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--log_every", "4", "--eval_every", "0", steps=10)
    logged = [line for line in capsys.readouterr().err.splitlines() if "| loss " in line]
    assert [int(line.partition("step ")[2].partition("/")[0]) for line in logged] == [1, 4, 8, 10]
    assert [line["step"] for line in metrics(directory)] == [*range(1, 11)]


def test_a_validation_loss_that_is_no_number_is_neither_the_best_nor_saved_as_one():
    progress = RunProgress(best_loss=2.0)
    record(progress, math.nan, at_end=False)
    assert (progress.val_loss, progress.best_loss, progress.unimproved, progress.is_best) == (None, 2.0, 1, False)


def test_sample_py_loads_the_best_checkpoint_on_demand_and_prints_its_name(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, *FLAGS, steps=9)
    for flags, said in (((), "spider-step9.pt: the newest checkpoint in "),
                        (("--best",), "spider-step4.pt: the checkpoint with the lowest validation loss, 2.0000")):
        assert sample.main([str(directory), "--prompt", "a", "--bytes", "2", *flags]) == 0
        assert said in capsys.readouterr().err
    for path in (directory / "spider-step9.pt", tmp_path / "nowhere"):
        assert sample.main([str(path), "--best", "--prompt", "a"]) == 2
        assert f"--best: {path} is not a directory of checkpoints" in capsys.readouterr().err
