"""A resumed run may change some flags and fields, with a line that names them, and no others."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from runs import assert_same_runs

from conftest import SMALL, final_state, metrics, run, run_flags, small_config

import train
from spider.errors import CheckpointError
from spider.training import run_identity
from spider.training.checkpoint_loading import find_checkpoints
from spider_model import Spider


def test_a_larger_batch_resumes_to_the_same_number_of_bytes_and_logs_the_change(tmp_path, shards, capsys):
    run(tmp_path, shards, "--target_tokens", "640", steps=5)
    directory = run(tmp_path, shards, "--target_tokens", "640", "--micro_batch", "4", steps=0)
    state = final_state(directory)
    assert state["bytes_seen"] == 5 * 64 + 3 * 128 and state["step"] == 8
    assert "--micro_batch was 2, is 4" in capsys.readouterr().err


def test_another_model_than_the_checkpoints_is_refused_with_the_difference(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=1)
    argv = ["--data_dir", str(shards), "--ckpt_dir", str(directory), "--set", SMALL + ",hidden_size=64"]
    assert train.command_line(argv) == 2
    assert "hidden_size is 32, not 64" in capsys.readouterr().err


@pytest.mark.parametrize("flags,said", (
    (("--reset_steps",), "changed by --set:"), ((), "settings differ from the run so far:")))
def test_what_has_no_shape_changes_with_a_line_and_stays_changed(tmp_path, shards, flags, said, capsys):
    """--set changes the checkpoint's model, so that nothing else of it need be given again."""
    origin = run(tmp_path, shards, steps=1) / "spider-step1.pt"
    setting = "--set", "core_loss_weight=0.5,act_threshold=0.9"
    changed = dict(core_loss_weight=0.5, act_threshold=0.9)
    directory = run(tmp_path, shards, "--resume", str(origin), *flags, *setting, steps=2, ckpt="on")
    line, = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert line.endswith(f"{said} act_threshold was 0.99, is 0.9; core_loss_weight was 0.0, is 0.5")
    assert final_state(directory)["cfg"] == final_state(tmp_path / "run")["cfg"] | changed
    assert metrics(directory)[-1]["core_loss"] > 0
    argv = run_flags(shards, directory, *setting, steps=4)
    for again in (argv[:-2], argv):                        # without any --set, and by the same
        at = again.index("--set")
        assert train.command_line(again[:at] + again[at + 2:]) == 0
    assert "act_threshold" not in capsys.readouterr().err
    assert final_state(directory)["step"] == 4 and final_state(directory)["cfg"]["core_loss_weight"] == 0.5


@pytest.mark.parametrize("flags", ((), ("--reset_steps",)))
def test_what_has_a_shape_is_refused_by_name_with_a_remedy_that_helps(tmp_path, shards, flags, capsys):
    """Fields that could change go unnamed; cuts that are no longer learned would leave weights over."""
    origin = run(tmp_path, shards, steps=1) / "spider-step1.pt"
    for setting, named in (("ponder_weight=0,act_threshold=0.5,rope_theta=10,places=3", "places is 1, not 3"),
                           ("boundaries=words", "boundaries is flexitokens, not words"),
                           ("act=false", "act is True, not False")):
        argv = run_flags(shards, tmp_path / "new", "--resume", str(origin), *flags, "--set", setting)
        assert train.command_line(argv) == 2 and not (tmp_path / "new").exists()
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"train.py: error: {origin} holds another model: {named}. Leave that out of --model and --set, or "
            f"train a new model, without --resume, in another --ckpt_dir")


def test_a_config_of_before_a_field_came_is_one_with_its_default():
    asked = small_config()
    saved = asdict(asked)
    for name in ("places", "core_loss_weight", "engram_match_words"):
        saved.pop(name)
    run_identity.check_same_model(Path("old.pt"), saved, asked, Spider)
    with pytest.raises(CheckpointError, match="places is 1, not 8"):
        run_identity.check_same_model(Path("old.pt"), saved, replace(asked, places=8), Spider)


def test_a_run_of_before_flexitokens_had_their_name_goes_on(tmp_path, shards):
    """Their name was learned, which now is another kind of boundaries."""
    path = find_checkpoints(run(tmp_path, shards, steps=3))[-1].path
    state = torch.load(path, weights_only=True)
    state["cfg"]["boundaries"] = "learned"
    del state["cfg"]["boundary_rate"]
    torch.save(state, path)
    argv = run_flags(shards, tmp_path / "run", steps=6)
    at = argv.index("--set")
    for flags in (argv[:at] + argv[at + 2:], argv):        # whose config is the checkpoint's, or --set's
        assert train.command_line(flags) == 0
    assert final_state(tmp_path / "run")["cfg"]["boundaries"] == "flexitokens"
    assert_same_runs(tmp_path / "run", run(tmp_path, shards, steps=6, ckpt="whole"))


def test_another_optimizer_than_the_checkpoints_is_refused_by_name(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--optimizer", "adamw", steps=1)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    assert train.command_line(run_flags(shards, directory, "--optimizer", "muon")) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "adamw, engram" in said and "muon, adamw, engram" in said and "--optimizer" in said
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_hyperparameters_come_from_this_runs_flags_not_from_the_checkpoint(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--optimizer", "adamw", steps=1)
    run(tmp_path, shards, "--optimizer", "adamw", "--weight_decay", "0.3", "--beta1", "0.8", steps=2)
    group = final_state(directory)["optimizer_state_dict"]["adamw"]["param_groups"][0]
    assert group["weight_decay"] == 0.3 and group["betas"] == (0.8, 0.95)
    assert "--weight_decay was 0.1, is 0.3" in capsys.readouterr().err


def test_dropout_of_a_run_from_before_there_was_any_is_named(tmp_path, shards, capsys):
    path = find_checkpoints(run(tmp_path, shards, "--dropout", "0", steps=1))[0].path
    state = torch.load(path)
    assert state["flags"].pop("dropout") == 0
    torch.save(state, path)
    run(tmp_path, shards, "--dropout", "0", steps=2)
    assert "settings differ" not in capsys.readouterr().err
    torch.save(state, path)
    run(tmp_path, shards, "--resume", str(path), steps=3)
    assert "--dropout was 0.0, is 0.5" in capsys.readouterr().err
