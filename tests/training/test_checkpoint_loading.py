"""Checkpoints hold what the contract names, and one of another program is refused with the difference."""

import math

import pytest
import torch
from conftest import SMALL, final_state, run, run_flags
from runs import trained  # noqa: F401

import sample
import train
from spider import errors
from spider.model.config import MAX_LOOPS
from spider.training.checkpoint_loading import find_checkpoints
from spider_model import Spider


@pytest.mark.parametrize("change", (
    dict(step="3"), dict(step=-1), dict(step=10 ** 60), dict(n_loops=0), dict(owed=5),
    dict(owed=dict(step=1, loss="x")), dict(owed=dict(loss=1.0)), dict(owed=dict(step=2)), dict(owed=dict(step=True)),
    dict(owed=dict(step=1, loss=10 ** 400)), dict(n_loops=4097), dict(flags=dict(seed=10 ** 400)),
    dict(average_loss=1.0, last_loss=None), dict(flags=dict(lr=torch.ones(2))),
    dict(average_loss=math.inf, last_loss=1.0), dict(last_loss=math.inf, average_loss=1.0), dict(noise=math.inf),
    dict(flags=dict(lr=math.inf)), dict(flags=dict(lr=math.nan)), dict(lowest_average=-math.inf),
    dict(targets=[torch.ones(2)]), dict(best_loss=math.nan), dict(exploded="no"), dict(optimizer_state_dict=[]),
    dict(lineage=None)), ids=lambda change: next(iter(change)))
def test_plain_values_that_no_run_writes_are_refused_by_name(tmp_path, trained, shards, change, capsys):
    torch.save(trained | change, tmp_path / "foreign.pt")
    assert train.command_line(run_flags(shards, tmp_path / "new", "--resume", str(tmp_path / "foreign.pt"))) == 2
    said = capsys.readouterr().err.splitlines()
    assert next(iter(change)) in said[-1] and "Traceback" not in "".join(said) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("damage", (
    lambda w: w.to("meta"), lambda w: w.to_sparse(), lambda w: w.int(), lambda w: w[:1], lambda w: None))
def test_weights_that_are_no_weights_are_refused(tmp_path, trained, shards, damage, capsys):
    weights = dict(trained["model_state_dict"])
    weights["lm_head.weight"] = damage(weights["lm_head.weight"])
    torch.save(trained | dict(model_state_dict=weights), tmp_path / "foreign.pt")
    assert train.command_line(run_flags(shards, tmp_path / "new", "--resume", str(tmp_path / "foreign.pt"))) == 2
    assert "foreign.pt" in capsys.readouterr().err.splitlines()[-1]


def test_another_vocabulary_is_refused(tmp_path, shards, capsys):
    argv = run_flags(shards, tmp_path / "run", "--set", SMALL + ",vocab_size=300", steps=1)
    assert train.command_line(argv) == 0
    plain = [word for word in run_flags(shards, tmp_path / "run", steps=2) if word not in ("--set", SMALL)]
    assert train.command_line(plain) == 2
    assert "another vocabulary: 300 ids instead of 272" in capsys.readouterr().err.splitlines()[-1]
    assert train.command_line(argv) == 0


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_ruined_weights_are_reported_not_sampled(tmp_path, shards, capsys, value):
    directory = run(tmp_path, shards, steps=2)
    state = final_state(directory)
    state["model_state_dict"]["lm_head.weight"][0, 0] = value
    torch.save(state, tmp_path / "ruined.pt")
    flags = ("--resume", str(tmp_path / "ruined.pt"), "--sample_every", "1")
    assert train.command_line(run_flags(shards, tmp_path / "new", *flags, steps=4)) == 0
    assert "its weights are ruined" in capsys.readouterr().err
    assert sample.main([str(tmp_path / "ruined.pt")]) == 2
    assert "its weights are ruined" in capsys.readouterr().err


def test_checkpoints_hold_what_the_contract_names_and_only_plain_values(tmp_path, shards):
    state = final_state(run(tmp_path, shards))
    assert {"model_state_dict", "optimizer_state_dict", "step", "epoch", "cfg", "best_loss"} <= state.keys()
    assert state["step"] == 6 and state["cfg"]["hidden_size"] == 32 and math.isfinite(state["best_loss"])


def test_the_most_loops_that_a_flag_takes_are_read_back(tmp_path, trained, capsys):
    for n_loops, fits in ((MAX_LOOPS, True), (MAX_LOOPS + 1, False)):
        torch.save(trained | dict(n_loops=n_loops), tmp_path / "spider-step1.pt")
        assert bool(find_checkpoints(tmp_path)) == fits
        argv = ["--n_loops", str(n_loops)]
        for parse in (train.parse_args, sample.parse_args):
            if fits:
                assert parse(argv).n_loops in (n_loops, [n_loops])
            else:
                with pytest.raises(errors.UsageError, match="at most 4096"):
                    parse(argv)


@pytest.mark.parametrize("change,complaint", (
    (dict(cfg={"dim": 3}), "unexpected keyword"), (dict(cfg=None), "cfg"),
    (dict(cfg={"engram_byte_rows": 10 ** 18}), "cfg: engram_byte_rows"), (dict(cfg={"act": 1}), "cfg: act"),
    (dict(cfg={"engram_orders": [3, "4"]}), "cfg: engram_orders"), (dict(cfg={"n_heads": 2.0}), "cfg: n_heads"),
    (dict(model_state_dict={}), "more layers than weights")))
def test_a_checkpoint_of_another_program_is_refused_with_the_difference(tmp_path, shards, change, complaint, capsys):
    directory = run(tmp_path, shards, steps=1)
    foreign = tmp_path / "foreign.pt"
    torch.save(final_state(directory) | change, foreign)
    assert train.command_line(["--resume", str(foreign), "--data_dir", str(shards)]) == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


class OwnSpider(Spider):
    """A model of somebody's own, of the same weights."""


def test_a_checkpoint_names_classes_that_are_not_ours_and_no_other_ones_run_on_its_weights(tmp_path, shards, capsys):
    argv = run_flags(shards, tmp_path / "own", steps=1)
    for steps in (1, 2):
        assert train.command_line(run_flags(shards, tmp_path / "own", steps=steps), model_class=OwnSpider) == 0
    assert final_state(tmp_path / "own")["classes"] == [f"{__name__}.OwnSpider"]
    assert train.command_line([*argv, "--max_steps", "3"]) == 2
    words = f"its model uses {__name__}.OwnSpider, but this one uses only Spider's own classes"
    assert words in capsys.readouterr().err
    assert sample.main([str(tmp_path / "own"), "--prompt", "a"]) == 2 and words in capsys.readouterr().err
    assert train.command_line([*argv, "--reset_steps"]) == 0                   # on purpose: the weights alone
    assert "classes" not in final_state(run(tmp_path, shards, steps=1, ckpt="ours"))
