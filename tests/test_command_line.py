"""The command line: precedence, every flag, one clear line and status 2, smoke run and dry run as users run them."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

import train
from conftest import ROOT, SMALL, contents, run, run_flags
from scripts import VARIABLES, forked
from spider.errors import UsageError
from spider.flags import value_text
from spider.model import config
from spider.training import machine
from spider.training.checkpoint_loading import find_checkpoints
from train import FLAGS, parse_args

ORIGINALS = {"seq_len": 2048, "micro_batch": 64, "grad_accum": 1, "n_loops": 6, "lr": 3e-4, "precision": "auto",
             "compile": "auto", "resume": None, "reset_steps": False, "ckpt_dir": "checkpoints", "data_dir": "data",
             "mock_data": False, "max_steps": 0, "no_gradient_checkpointing": False, "target_tokens": 10_000_000_000,
             "ckpt_every": 50}


def command(*argv, cwd, script="train.py", **environ):
    """Runs a script as a user would; returns the finished process."""
    env = {k: v for k, v in os.environ.items() if k not in VARIABLES} | environ
    return subprocess.run([sys.executable, str(ROOT / script), *map(str, argv)], cwd=cwd, env=env, text=True,
                          errors="replace", capture_output=True, timeout=600)


def refused(argv, capsys) -> str:
    """The one line of a command that fails with status 2."""
    assert train.command_line([str(a) for a in argv]) == 2
    err = capsys.readouterr().err.splitlines()
    faults = [line for line in err if line.startswith("train.py: error: ")]
    assert len(faults) == 1 and err[-1] == faults[0]
    return faults[0]


def test_names_defaults_and_variables_of_the_original_are_kept():
    args = parse_args([], environ={})
    for name, default in ORIGINALS.items():
        assert getattr(args, name) == default, name
    variables = {flag.env: flag.name for flag in FLAGS if flag.env}
    assert variables == {name.upper(): name for name in ("seq_len", "micro_batch", "grad_accum", "n_loops", "lr",
                                                         "data_dir", "target_tokens", "ckpt_every")}


def test_help_shows_every_choice_of_every_flag(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    said = capsys.readouterr().out
    for choices in ("{auto,1b,base,small,tiny}", "{auto,adamw,adamw8bit,muon}", "{cosine,wsd}", "{auto,cpu,cuda}",
                    "{auto,fp8,bf16,fp32}", "{auto,loop,grouped,tile}", "{auto,on,off}"):
        assert choices in said


def test_a_flag_beats_the_environment_and_that_beats_the_default():
    assert parse_args([], environ={"SEQ_LEN": "512", "TARGET_TOKENS": "5e6"}).seq_len == 512
    args = parse_args(["--seq_len", "128"], environ={"SEQ_LEN": "512", "LR": ""})
    assert args.seq_len == 128 and args.lr == 3e-4 and args.given == {"seq_len"}


@pytest.mark.parametrize("name,text", [
    ("seq_len", "1"), ("seq_len", "many"), ("seq_len", "2.5"), ("micro_batch", "0"), ("lr", "0"), ("lr", "-1"),
    ("lr", "nan"), ("lr", "inf"), ("precision", "fp16"), ("model", "2b"), ("moe_backend", "fast"),
    ("optimizer", "sgd"), ("keep_last", "1"), ("min_lr_fraction", "1.5"), ("beta1", "x"), ("schedule", ""),
    ("target_tokens", "-3"), ("seed", "-1"), ("seed", "1e20"), ("beta1", "1"), ("momentum", "1"), ("max_steps", "nan"),
    ("grad_accum", "4e18"), ("micro_batch", "4e18"), ("seq_len", "4e18"), ("eval_tokens", "4e18"),
    ("keep_last", "4e18"), ("n_loops", "4e18"), ("engram_reset", "yes")])
def test_a_bad_value_of_a_flag_or_variable_is_named(name, text):
    with pytest.raises(UsageError, match=rf"^--{name}: "):
        parse_args([f"--{name}={text}"], environ={})
    flag = next(flag for flag in FLAGS if flag.name == name)
    if flag.env and text:
        with pytest.raises(UsageError, match=rf"^{flag.env}: "):
            parse_args([], environ={flag.env: text})


@pytest.mark.parametrize("setting,complaint", [
    ("nonsense=1", "not a field"), ("hidden_size=big", "takes int"), ("act=maybe", "true or false"),
    ("engram_layers=1+x", "whole numbers"), ("boundaries=random", "one of learned"), ("v_head_dim=7", "must equal"),
    ("n_experts_per_tok=99", "between 1 and"), ("hidden_size=-3", "at least 1"), ("engram_rows=5", "primes"),
    ("engram_orders=", "need engram_orders"), ("engram_byte_orders=0", "ascending"), ("engram_orders=3+3", "ascending"),
    ("engram_match_words=2+1", "ascending numbers of words"),
    ("engram_layers=-1", "between 0"), ("boundary_prior=0", "between 0 and 1"), ("rope_theta=nan", "takes float"),
    ("rope_theta=1e400", "at most"), ("engram_layers=0+0", "each layer once"),
    ("n_routed_experts=0,n_shared_experts=0", "shared expert"), ("vocab_size=100", "at least 272"),
    ("hidden_size=3", "multiple of 16"), ("hidden_size=65", "multiple of 16"), ("hidden_size=1e15", "takes int"),
    ("engram_byte_rows=1" + "0" * 18, "at most"), ("n_recurrent_layers=1000000000", "at most"),
    ("n_loops=2", "--n_loops")])
def test_a_bad_model_setting_is_named(setting, complaint, capsys):
    line = refused(["--mock_data", "--model", "tiny", "--set", setting], capsys)
    assert "--set" in line and complaint in line


def test_every_flag_is_read_somewhere_and_every_choice_is_accepted():
    source = "".join(path.read_text() for path in (ROOT / "train.py", *(ROOT / "spider" / "training").glob("*.py")))
    for flag in FLAGS:
        assert re.search(rf"\b(args|plan|out|output|schedule|settings|batch|shape|machine_plan|machine|optimizer)\."
                         rf"{flag.name}\b|(values|flags)\[\"{flag.name}\"\]", source), flag.name
    for name, choices in {"model": ("auto", "tiny", "small", "base", "1b"),
                          "precision": ("auto", "fp8", "bf16", "fp32"), "schedule": ("cosine", "wsd"),
                          "moe_backend": ("auto", "loop", "grouped", "tile"),
                          "optimizer": ("auto", "adamw", "adamw8bit", "muon"),
                           "device": ("auto", "cpu", "cuda"), "compile": ("auto", "on", "off"),
                           "recompute": ("auto", "nothing", "core", "all")}.items():
        for choice in choices:
            assert getattr(parse_args([f"--{name}", choice], environ={}), name) == choice


def test_every_field_of_the_config_is_read_by_the_model():
    source = "".join(path.read_text() for path in (ROOT / "spider_model.py", *(ROOT / "spider" / "model").glob("*.py")))
    for field in fields(config.SpiderConfig):
        assert re.search(rf"\b(c|config)\.{field.name}\b", source), field.name


@pytest.fixture
def shards(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    np.full(500, 65, "<u2").tofile(directory / "a.bin")
    return directory


def test_bad_data_is_one_line_that_names_file_and_place(tmp_path, shards, capsys):
    base = ["--model", "tiny", "--ckpt_dir", tmp_path / "run", "--seq_len", "32"]
    assert "nowhere" in refused([*base, "--data_dir", tmp_path / "nowhere"], capsys)
    (tmp_path / "empty").mkdir()
    assert ".bin" in refused([*base, "--data_dir", tmp_path / "empty"], capsys)
    assert "longer than the data" in refused([*base, "--data_dir", shards, "--seq_len", "4096"], capsys)
    bad = np.full(500, 65, "<u2")
    bad[123] = 272
    bad.tofile(shards / "b.bin")
    line = refused([*base, "--data_dir", shards], capsys)
    assert "b.bin" in line and "246" in line and "272" in line
    (shards / "b.bin").write_bytes(b"odd")
    line = refused([*base, "--data_dir", shards], capsys)
    assert "b.bin" in line and "odd" in line
    assert not (tmp_path / "run").exists()
    (shards / "b.bin").unlink()
    (tmp_path / "file").write_text("no directory")
    assert "file" in refused([*base, "--data_dir", shards, "--ckpt_dir", tmp_path / "file"], capsys)


def test_what_this_machine_cannot_do_is_an_error_that_names_the_remedy(tmp_path, capsys, monkeypatch):
    base = ["--mock_data", "--model", "tiny", "--ckpt_dir", tmp_path]
    assert 'pip install -e ".[tile]"' in refused([*base, "--moe_backend", "tile"], capsys)
    if not train.torch.cuda.is_available():
        assert "--device cpu" in refused([*base, "--device", "cuda"], capsys)
    assert "does not exist" in refused([*base, "--resume", tmp_path / "none.pt"], capsys)
    assert "--reset_steps" in refused([*base, "--reset_steps"], capsys)
    without = ["--set", "engram_layers=,engram_byte_orders="]
    assert "no Engram tables" in refused([*base, "--engram_reset", *without], capsys)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "WORLD_SIZE" in (line := refused(base, capsys)) and "torchrun" in line


def test_unknown_and_abbreviated_flags_are_refused(capsys):
    assert "--sequence" in refused(["--sequence", "3"], capsys)
    assert "--seq" in refused(["--seq", "3"], capsys)


def test_the_smoke_run_of_the_readme_learns_and_leaves_a_checkpoint_and_metrics(tmp_path, processes):
    argv = ("--mock_data", "--max_steps", "20", "--seq_len", "128", "--micro_batch", "2")
    done = command(*argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "checkpoints/mock/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    parts = ("boundary_loss", "aux_loss", "z_loss", "ponder_loss", "core_loss", "surprise_loss")
    for key in ("loss", "grad_norm", "lr", "tok_per_sec", "bytes_per_segment", "mean_loops", "time", "bytes_seen",
                "epoch", "memory", "bf16_mfu", *parts):
        assert all(isinstance(line[key], (int, float)) for line in lines), key
    for line in lines:
        assert line["total_loss"] == pytest.approx(line["loss"] + sum(line[part] for part in parts), rel=1e-5)
        assert line["bytes_seen"] == line["step"] * 256 and 0 < line["bf16_mfu"] < 1 and 0.1 < line["memory"] < 10
    assert sorted(line["time"] for line in lines) == [line["time"] for line in lines] and lines[0]["time"] > 1.7e9
    assert "val_bpb" in lines[-1] and lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert (tmp_path / "checkpoints/mock/spider-step20.pt").exists() and not find_checkpoints(tmp_path / "checkpoints")
    for said in ("model tiny", "precision", "expert backend grouped", "optimizer muon", "step 20/20", "bytes/s",
                 "bytes/segment", "loops", "balance", "GB", "ETA"):
        assert said in done.stderr, said
    again = forked(processes, *argv, cwd=tmp_path)
    assert again.returncode == 0 and "nothing to do" in again.stderr
    spoken = forked(processes, "checkpoints/mock", "--prompt", "ba", "--bytes", "20", cwd=tmp_path, script="sample")
    assert spoken.returncode == 0 and spoken.stdout.startswith("ba")


def test_the_line_of_the_recipe_lists_the_values_that_the_run_has_from_it(tmp_path, capsys):
    def taken(*flags):
        base = ["--mock_data", "--dry_run", "--model", "tiny", "--ckpt_dir", str(tmp_path)]
        assert train.command_line([*base, *flags]) == 0
        return re.search("^recipe of tiny: (.*)", capsys.readouterr().out, re.MULTILINE)[1]
    assert "--target_tokens 12000000 --lr 0.00476 --warmup_steps 40 --dropout 0.5 --engram_reset on" in taken()
    assert taken("--target_flops", "1e12").split()[6:10] == ["--lr", "0.02", "--warmup_steps", "2"]
    assert "--engram_reset" not in taken("--set", "engram_layers=,engram_byte_orders=")
    assert "--n_loops" not in taken("--n_loops", "1")
    given = [word for name, value in train.RECIPES["tiny"].items()
             for word in (f"--{name}", "5" if callable(value) else value_text(value))]
    assert taken(*given) == "all values overridden"


def test_the_dry_run_of_the_1b_model_is_quick_small_and_complete(tmp_path):
    """Its own peak counts: the process that starts it has more in memory than it may take."""
    probe = ("import sys, train; from spider.training import machine; status = train.command_line(sys.argv[1:]);"
             "print('PEAK', machine.peak_memory(train.torch.device('cpu'))); sys.exit(status)")
    ballast = np.ones(125_000_000)
    done = subprocess.run([sys.executable, "-c", probe, "--model", "1b", "--dry_run", "--mock_data", "--device", "cpu"],
                          cwd=tmp_path, text=True, capture_output=True, timeout=600,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert machine.peak_memory(train.torch.device("cpu")) > ballast.nbytes / 1e9
    assert done.returncode == done.stdout.startswith("NOT ENOUGH"), done.stderr
    for said in ("recipe of 1b: the defaults of --help", "hidden_size = 2048", "routed experts", "Engram tables",
                 "active per byte", "FLOPs per byte", "memory: about", "free for 3 checkpoints of 7.3", "all checked",
                 "FP8 converts", "of training at", "from matrix products alone; no step was timed, "):
        assert said in done.stdout, said
    total = int(re.search(r"total +([\d,]+)", done.stdout)[1].replace(",", ""))
    assert abs(total / 996e6 - 1) < 0.005
    assert float(done.stdout.split("PEAK")[1]) < 0.8
    assert not list(tmp_path.iterdir())


def test_a_closed_pipe_of_the_dry_run_is_not_an_error(tmp_path, processes):
    done = forked(processes, "--dry_run", "--mock_data", "--model", "tiny", cwd=tmp_path, read=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_originals_commands_parse():
    for line in ("--seq_len 256 --micro_batch 112 --grad_accum 4 --precision fp8 --n_loops 6",
                 "--resume checkpoints/spider-step2650.pt", "--resume checkpoints/spider-step2650.pt --reset_steps",
                 "--compile --precision fp8", "--mock_data --max_steps 20 --seq_len 128 --micro_batch 2"):
        named = {word.removeprefix("--") for word in line.split() if word.startswith("--")}
        assert parse_args(line.split(), environ={}).given == named


def test_missing_parts_of_libraries_are_not_logged_and_used_variables_are(tmp_path):
    done = command("--mock_data", "--max_steps", "1", "--micro_batch", "2", "--eval_every", "0", "--precision", "fp8",
                   "--optimizer", "adamw8bit", "--set", SMALL, cwd=tmp_path, SEQ_LEN="64", N_LOOPS="1")
    assert done.returncode == 0, done.stderr
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in done.stderr.splitlines()), done.stderr
    assert "from the environment: N_LOOPS=1 SEQ_LEN=64" in done.stderr


def test_wandb_is_used_only_with_a_run_name_and_works_offline(tmp_path, shards, processes):
    settings = dict(WANDB_MODE="offline", WANDB__SERVICE_WAIT="300")
    back = ("--resume", str(tmp_path / "run" / "spider-step3.pt"))
    for steps, flags in enumerate(((), ("--run", "smoke"), ("--run", "smoke"), ("--run", "other"),
                                   ("--run", "other", *back)), 1):
        assert (tmp_path / "wandb").exists() == (steps > 2)
        argv = run_flags(shards, tmp_path / "run", "--eval_every", "0", *flags, steps=steps)
        done = forked(processes, *argv, cwd=tmp_path, **settings)
        assert done.returncode == 0, done.stderr
    smoke, again, other, back = sorted((tmp_path / "wandb").glob("offline-run-*"), key=os.path.getmtime)
    names = [path.name.rpartition("-")[2] for path in (smoke, again, other, back)]
    assert names[0] == names[1] and len({*names}) == 3     # the name goes on, unless it is another or the run goes back


def test_the_profiler_leaves_a_trace(tmp_path, shards, processes):
    argv = run_flags(shards, tmp_path / "run", "--eval_every", "0", "--profile")
    done = forked(processes, *argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "trace.json").stat().st_size > 1000


@pytest.mark.gpu
def test_the_originals_fp8_commands_train_on_a_gpu(tmp_path):
    base = ("--mock_data", "--model", "tiny", "--max_steps", "8", "--seq_len", "256", "--micro_batch", "8",
            "--eval_every", "0")
    for flags in ((), ("--grad_accum", "4", "--n_loops", "6"), ("--compile",), ("--fp8_experts",)):
        done = command(*base, "--precision", "fp8", *flags, "--ckpt_dir", "-".join(("run", *flags)), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "-".join(("run", *flags)) / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["loss"] < json.loads(lines[0])["loss"]


@pytest.mark.slow
def test_compiled_layers_train_like_the_others(tmp_path):
    base = ("--mock_data", "--max_steps", "3", "--seq_len", "64", "--micro_batch", "2", "--eval_every", "0",
            "--n_loops", "2", "--precision", "fp32")
    losses = []
    for flags in ((), ("--compile",)):
        done = command(*base, *flags, "--ckpt_dir", f"run{len(flags)}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / f"run{len(flags)}" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


@pytest.mark.parametrize("dry", (True, False))
def test_a_horizon_that_does_not_suit_the_data_or_the_steps_is_a_warning_with_the_remedy(tmp_path, shards, capsys, dry):
    """40 passes over 494 bytes, and a stop while the rate is at its peak; nothing where both suit."""
    for flags, warned in ((("--target_tokens", "20000"), ("is 40 epochs", "at most", "--max_steps 2 ends the run")),
                          (("--target_tokens", "128"), ())):
        argv = run_flags(shards, tmp_path / f"run{len(warned)}", *flags, *["--dry_run"] * dry, steps=2)
        assert train.command_line(argv) == 0
        said = "".join(capsys.readouterr())
        assert all(words in said for words in warned) and ("memorizes the data" in said) == bool(warned)
        assert not dry or ("run: 2 steps of 64 bytes, 0.259 epochs, 0.1 seconds of training at 1,000 "
                           "bytes/s") in said


def test_mock_runs_have_a_directory_of_their_own_unless_one_is_named():
    assert [parse_args(argv, environ={}).ckpt_dir for argv in (
        [], ["--mock_data"], ["--mock_data", "off"], ["--mock_data", "--ckpt_dir", "checkpoints"])] == [
        "checkpoints", "checkpoints/mock", "checkpoints", "checkpoints"]


@pytest.mark.parametrize("before, now", ((("--mock_data",), ()), ((), ("--mock_data",))), ids=("mock", "real"))
def test_real_data_and_mock_data_resume_from_each_others_weights_only_by_resume(tmp_path, shards, capsys, before, now):
    directory = run(tmp_path, shards, *before, steps=2)
    was = contents(directory)
    for flags in ((), ("--reset_steps",)):
        line = refused(run_flags(shards, directory, *now, *flags), capsys)
        assert f"{directory}/spider-step2.pt" in line and "--resume" in line and "another --ckpt_dir" in line
    assert {name: content for name, content in contents(directory).items() if name in was} == was
    run(tmp_path, shards, *now, "--resume", str(directory / "spider-step2.pt"), steps=3)
    run(tmp_path, shards, *now, steps=4)


def test_a_dry_run_prints_what_a_run_would_find_in_a_directory_and_never_fails(tmp_path, shards, capsys):
    def says(*flags):
        was = contents(directory)
        assert train.command_line(run_flags(shards, directory, "--dry_run", *flags)) == 0
        assert contents(directory) == was
        said = capsys.readouterr().out
        return said, re.findall("^a run would be refused: .*", said, re.MULTILINE)
    directory = run(tmp_path, shards, steps=2)
    said, refusals = says()
    assert not refusals and f"resuming from {directory}/spider-step2.pt (step 2)" in said
    said, (line,) = says("--set", f"{SMALL},hidden_size=64")
    assert "hidden_size is 32, not 64" in line and "  hidden_size = 64" in said and "resuming" not in said
    assert "real data" in says("--mock_data")[1][0]
    (directory / "started-over.json").write_text("no note")
    assert "started-over.json" in says()[1][0]
    (directory / "started-over.json").unlink()
    (directory / "spider-step2.pt").write_bytes(b"no checkpoint")
    assert "none of the checkpoints" in says()[1][0]
    assert "does not exist" in refused(run_flags(shards, directory, "--dry_run", "--resume", "gone.pt"), capsys)


@pytest.mark.parametrize("dry", (True, False))
def test_steps_beyond_the_horizon_are_a_warning_with_their_rate_and_the_remedy(tmp_path, shards, capsys, dry):
    """A horizon of 2 steps of 64 bytes; as many steps as it has, or fewer, are none of that."""
    for steps in (2, 5):
        argv = run_flags(shards, tmp_path / f"run{steps}", "--target_tokens", "127", "--eval_every", "0",
                         *["--dry_run"] * dry, steps=steps)
        assert train.command_line(argv) == 0
        said = [line for part in capsys.readouterr() for line in part.splitlines() if "beyond the horizon" in line]
        assert len(said) == (steps == 5)
    assert "--max_steps 5: steps 3 to 5 are beyond the horizon, at a learning rate of 0.001" in said[0]


def test_the_dry_run_goes_by_the_rate_that_a_run_there_had(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=3)
    assert train.command_line(run_flags(shards, directory, "--dry_run")) == 0
    assert f"measured by the run in {directory}" in capsys.readouterr().out


def test_torchrun_is_told_the_line_that_ended_a_rank(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert train.command_line(["--lr", "-1"]) == 2
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert told == capsys.readouterr().err.strip() and told.startswith("train.py: error: --lr: '-1' is not a number")


def test_a_finished_run_names_its_curves_and_the_next_command(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--eval_every", "0", steps=1)
    done, after, curves = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()[-3:]]
    assert done.startswith("done: step 1") and after == f"next: python sample.py {directory}"
    assert curves == f"curves: {directory / 'curves.png'}"
