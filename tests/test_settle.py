"""From flags, environment and --config to the plan of a run: precedence, recipes, horizons, bad
values."""

import math
import os
import random
import re
import shlex
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields, replace

import pytest
import torch

import data
import train
from conftest import ROOT, final_state, refused, run_flags, settled, world_of
from spider import estimate, machine
from spider.common import UsageError
from spider.config import PRESETS, SpiderConfig
from spider.run import RunProgress
from spider_model import Spider
from tile_moe import KERNELS
from train import RECIPES, parse_args

FLAGS = {
    action.option_strings[0][2:]: action
    for action in train.flag_parser()._actions
    if action.dest != "help"
}
CHOICES = {name: action.choices for name, action in FLAGS.items() if action.choices}
NUMBERS = [name for name, action in FLAGS.items() if action.type is not None]
ORIGINALS = dict(
    seq_len=2048,
    micro_batch=64,
    grad_accum=1,
    n_loops=6,
    lr=3e-4,
    precision="auto",
    compile="auto",
    resume=None,
    reset_steps=False,
    ckpt_dir="checkpoints",
    data_dir="data",
    mock_data=False,
    max_steps=0,
    target_tokens=10_000_000_000,
    ckpt_every=50,
)


def parsed(*argv, **environ):
    return parse_args([*map(str, argv)], environ)


# --------------------------------------------------------------------------------------------------
# Flags


def test_names_defaults_variables_and_commands_of_the_original_are_kept():
    args = parsed()
    for name, default in ORIGINALS.items():
        assert getattr(args, name) == default, name
    assert {*train.ENVIRONMENT} == {
        "seq_len",
        "micro_batch",
        "grad_accum",
        "n_loops",
        "lr",
        "data_dir",
        "target_tokens",
        "ckpt_every",
    }
    for line in (
        "--seq_len 256 --micro_batch 112 --grad_accum 4 --precision fp8 --n_loops 6",
        "--resume checkpoints/spider-step2650.pt",
        "--resume checkpoints/spider-step2650.pt --reset_steps",
        "--compile --precision fp8",
        "--mock_data --max_steps 20 --seq_len 128 --micro_batch 2",
    ):
        words = line.split()
        assert parsed(*words).given == {word[2:] for word in words if word.startswith("--")}
    assert parsed("--compile", "--precision", "fp8").compile == "on"
    assert (
        parsed("--no_gradient_checkpointing").recompute == "nothing"
        and parsed().recompute == "auto"
    )


def test_every_choice_of_a_flag_is_accepted():
    assert CHOICES.keys() == {
        "model",
        "optimizer",
        "schedule",
        "device",
        "precision",
        "moe_backend",
        "compile",
        "recompute",
    }
    assert {*CHOICES["model"]} == {"auto", *PRESETS} and "original" in PRESETS
    for name, choices in CHOICES.items():
        for choice in choices:
            assert getattr(parsed(f"--{name}", choice), name) == choice


def test_every_field_of_the_config_is_read_by_the_model():
    source = "".join(
        path.read_text()
        for path in (
            ROOT / "spider_model.py",
            *(ROOT / "spider").glob("*.py"),
            ROOT / "tile_moe.py",
        )
    )
    for field in fields(SpiderConfig):
        assert re.search(rf"\b(c|config)\.{field.name}\b", source), field.name


def test_a_flag_beats_the_environment_that_the_file_that_the_recipe(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(
        "lr = 0.5\nmicro_batch = 3\n[optimizer]\nmin_lr_fraction = 0.3\nengram_reset = false\n"
    )
    plan = settled(
        "--model",
        "tiny",
        "--config",
        str(file),
        "--lr",
        "0.1",
        environ={"SEQ_LEN": "64", "LR": "9", "MICRO_BATCH": "5", "N_LOOPS": ""},
    )
    assert (plan.lr, plan.seq_len, plan.micro_batch, plan.min_lr_fraction) == (0.1, 64, 5, 0.3)
    assert plan.n_loops == RECIPES["tiny"]["n_loops"] and plan.engram_reset is False
    assert settled("--model", "tiny", "--config", str(file), "--engram_reset").engram_reset is True


def test_an_alternative_replaces_those_of_less_precedence(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("target_tokens = 5\nglobal_batch = 64\nmock_data = true\n")
    args = parsed("--config", file, "--minutes", 7, "--grad_accum", 2, "--data_dir", "d")
    assert args.given == {"config", "minutes", "grad_accum", "data_dir"} and not args.mock_data
    args = parsed("--target_flops", 1, TARGET_TOKENS="5", LR="1", SEQ_LEN="7")
    assert args.given == {"target_flops", "lr", "seq_len"} and args.inherited == dict(
        seq_len=7, lr=1.0
    )
    with pytest.raises(
        UsageError, match="--target_flops: --target_tokens already sets the horizon"
    ):
        parsed("--target_flops", 1, "--target_tokens", 5)


@pytest.mark.parametrize(
    "text, fault",
    (
        ("lrr = 1", "unknown flag lrr"),
        ("[x]\nlrr = 1", "unknown flag lrr"),
        ("lr = 2000", "--lr"),
        ("lr = [1]", "--lr"),
        ("lr = true", "--lr"),
        ("compile = false", "--compile"),
        ("steps", "toml"),
        (b"\xff", "toml"),
        ("lr = 1\nlr = 1", "toml"),
        ('mock_data = "yes"', "--mock_data"),
        ('config = "a"', "unknown flag config"),
        (None, "No such file"),
        ("help = true", "unknown flag help"),
        ("no-engram_reset = true", "unknown flag no-engram_reset"),
        ("lr = 1\n[x]\nlr = 2", "lr is set twice"),
        ("[x]\nmock_data = true\n[y]\nmock_data = false", "set twice"),
        ('recompute = "all"\n[x]\nno_gradient_checkpointing = true', "set twice"),
        ("a = " + "[" * 100_000, "toml"),
        (b"lr = 1\x00", "toml"),
        *(
            (f'{name} = "a\\u0000b"', f"--{name}: 'a\\x00b' is not a path")
            for name in ("data_dir", "ckpt_dir", "resume")
        ),
    ),
)
def test_a_bad_config_file_is_one_line_with_its_name(tmp_path, text, fault):
    file = tmp_path / "a.toml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as raised:
        parsed("--config", file)
    line = str(raised.value)
    assert line.startswith(f"--config: {file}: ") and "\n" not in line
    assert fault in line or fault == "toml"


def test_a_skipped_step_and_a_spike_are_logged_with_the_command_that_shows_their_batch():
    shape = (
        "--model",
        "tiny",
        "--seq_len",
        "32",
        "--micro_batch",
        "2",
        "--grad_accum",
        "3",
        "--seed",
        "7",
    )
    for flags, where, skipped, what in (
        (("--mock_data",), "--mock_data", 1, "skipped: loss or gradient is not finite"),
        (("--data_dir", "a b"), "'a b'", 0, "is a spike"),
    ):
        progress = RunProgress(step=5, bytes_seen=5 * 6 * 32, skipped=skipped)
        assert train.odd_step_line(progress, settled(*shape, *flags)) == (
            f"step 5 {what}; its batch: python data.py show {where} --seq_len 32 --seed 7 "
            f"--first 24 --count 6"
        )


@pytest.mark.parametrize("name", ("my dir; touch X", "x$(touch P)", "-x", "--lr", "a'b"))
def test_commands_of_the_log_can_be_pasted_whatever_a_directory_is_called(name):
    assert parsed(*shlex.split(train.pasteable("data_dir", name))).data_dir == name
    plan = settled("--model", "tiny", f"--data_dir={name}", "--seq_len", "32", "--micro_batch", "4")
    line = train.odd_step_line(RunProgress(step=3, bytes_seen=3 * 4 * 32), plan)
    argv = shlex.split(line.partition("its batch: python ")[2])
    args = data.parse_args(argv[1:])
    assert argv[0] == "data.py" and os.path.normpath(args.directory) == name
    assert (args.seq_len, args.first, args.count) == (32, 8, 4)


# --------------------------------------------------------------------------------------------------
# Bad values

JUNK = [
    "",
    " ",
    "-",
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "0x10",
    "2.5",
    "9" * 5000,
    "\u00b2",
    "\u0663",
    "a\nb",
    "\x1b[2J",
    "\udcff",
    "None",
    "true",
    "1,2",
    "1.7e308",
    "4e18",
    "--",
    "=",
    "--lr",
]


def test_any_value_of_any_flag_or_variable_is_taken_or_refused_by_name():
    rng, taken, bad = random.Random(7), 0, 0
    for name in FLAGS.keys() - {"config"}:
        for value in (
            *JUNK,
            "5",
            "0.5",
            repr(rng.uniform(-9, 9)),
            *(choice for choice in CHOICES.get(name) or ()),
        ):
            sources = [([f"--{name}={value}"], {}, f"--{name}")]
            if name in train.ENVIRONMENT and value:
                sources.append(([], {name.upper(): value}, name.upper()))
            for argv, environ, source in sources:
                try:
                    got = getattr(parse_args(argv, environ), name)
                    taken += 1
                    assert not isinstance(got, float) or math.isfinite(got), (argv, environ)
                except UsageError as fault:
                    bad += 1
                    assert source in str(fault), (argv, environ, str(fault))
    assert taken > 100 and bad > 600


@pytest.mark.parametrize(
    "flag, value",
    (
        ("seq_len", "1"),
        ("seq_len", "4e18"),
        ("micro_batch", "0"),
        ("lr", "0"),
        ("lr", "nan"),
        ("lr", "1e39"),
        ("precision", "fp16"),
        ("model", "2b"),
        ("keep_last", "1"),
        ("min_lr_fraction", "1.5"),
        ("beta1", "1"),
        ("seed", "-1"),
        ("n_loops", "4097"),
        ("minutes", "0"),
        ("minutes", "1e10"),
        ("schedule", ""),
        ("engram_reset", "yes"),
        ("data_dir", ""),
        # an empty path would be the working directory
        ("ckpt_dir", ""),
        ("resume", ""),
        ("config", ""),
    ),
)
def test_values_out_of_range_are_refused(flag, value):
    with pytest.raises(UsageError, match=f"--{flag}"):
        parsed(f"--{flag}={value}")


@pytest.mark.parametrize(
    "setting, complaint",
    (
        ("nonsense=1", "not a field"),
        ("n_loops=2", "not a field"),
        ("hidden_size=big", "takes int"),
        ("act=maybe", "true or false"),
        ("engram_layers=1+x", "whole numbers"),
        ("v_head_dim=7", "must equal"),
    ),
)
def test_a_bad_setting_of_the_model_is_named(setting, complaint):
    with pytest.raises(UsageError, match="^--set: ") as raised:
        settled("--model", "tiny", "--set", setting)
    assert complaint in str(raised.value)


EXTREMES = ["1e300", "1e18", str((1 << 62) - 1), "1000", "1", "1e-46", "5e-324", "-0.0", "0"]
# or a large run
LONG = {"seq_len", "micro_batch", "grad_accum", "global_batch", "max_steps", "n_loops", "minutes"}


@pytest.mark.parametrize("optimizer", ("muon", "adamw"))
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("lr", "weight_decay") else pytest.param(name, marks=pytest.mark.slow)
        for name in NUMBERS
        if name not in LONG | {"data_dir", "ckpt_dir", "resume", "config"}
    ],
)
def test_any_number_that_a_flag_takes_gives_a_run_or_one_line(
    tmp_path, shards, capsys, name, optimizer
):
    taken = []
    for text in EXTREMES:
        with suppress(Exception):
            taken.append((FLAGS[name].type(text), text))
    for _, text in (min(taken), max(taken)):
        argv = run_flags(
            shards, tmp_path / text, "--optimizer", optimizer, f"--{name}={text}", steps=3
        )
        status, said = train.command_line(argv), capsys.readouterr().err.splitlines()
        assert status == 0 or status == 2 and f"train.py: error: --{name}" in said[-1], (
            text,
            said[-1],
        )


# --------------------------------------------------------------------------------------------------
# Recipes


@pytest.mark.parametrize(
    "asked, here, elsewhere, kept",
    (
        ("auto", "triton", "triton", "triton"),
        ("auto", "tile", "tile", "tile"),
        ("auto", "triton", "tile", "grouped"),
        ("auto", "tile", "grouped", "grouped"),
        ("auto", "grouped", "triton", "grouped"),
        ("triton", "triton", "tile", "triton"),
    ),
)
def test_auto_keeps_a_kernel_only_where_all_ranks_chose_it(
    monkeypatch, asked, here, elsewhere, kept
):
    """Unlike GPUs may choose differently; every rank asks the others about each kernel in turn."""
    world, kernels = world_of(), iter(KERNELS)
    world.all = lambda agrees: elsewhere == next(kernels) and agrees
    monkeypatch.setattr(train, "resolve_backend", lambda *_: (here, ""))
    assert train.settle(parsed("--moe_backend", asked), world).moe_backend == kept


def test_auto_takes_what_suits_the_device_or_what_the_checkpoint_had(monkeypatch):
    plan = settled("--model", "1b")
    assert (
        plan.seq_len,
        plan.micro_batch,
        plan.grad_accum,
        plan.n_loops,
        plan.lr,
        plan.target_tokens,
        plan.ckpt_every,
    ) == (2048, 64, 1, 6, 3e-4, 10**10, 50)
    monkeypatch.setattr(machine, "memory_of", lambda *_: 1.5e11)
    monkeypatch.setattr(machine, "resolve_precision", lambda *_: ("bf16", ""))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert settled("--compile", "off", "--moe_backend", "loop", device="cuda").recipe == "1b"
    for saved, recipe in ((None, "tiny"), ("small", "small")):
        state = dict(recipe=saved, cfg=asdict(SpiderConfig.preset(recipe)))
        assert settled(state=saved and state).recipe == recipe


def test_the_expert_backend_is_chosen_for_the_type_of_the_products(monkeypatch):
    asked = []
    monkeypatch.setattr(
        train, "resolve_backend", lambda *given: asked.append(given[3]) or ("grouped", "")
    )
    for precision in ("fp32", "bf16", "fp8"):
        settled("--precision", precision)
    assert asked == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_the_original_is_one_word():
    config = settled("--model", "original").config
    assert config == SpiderConfig() and config.boundaries == "flexitokens" and config.act
    assert (config.n_loops, config.n_routed_experts, config.engram_layers) == (6, 32, (1, 4))


def test_every_recipe_names_flags_and_values_that_they_take():
    assert RECIPES.keys() == PRESETS.keys()
    for recipe in RECIPES.values():
        for name, value in recipe.items():
            if not callable(value):
                words = [f"--{name}"] if value is True else [f"--{name}={value}"]
                assert getattr(parsed(*words), name) == value


def test_the_rate_of_a_small_recipe_falls_with_steps_and_width_and_its_warm_up_is_brief():
    def plan(*argv, model="tiny"):
        return settled("--model", model, *argv)

    few = ("--target_tokens", "4096000")  # a thousand steps
    lr = plan(*few).lr
    assert lr == pytest.approx(0.00732, rel=0.01) and plan(*few, "--lr", "0.5").lr == 0.5
    assert plan("--target_tokens", "32768000").lr == pytest.approx(lr / 8**0.4, rel=0.02)
    assert plan(*few, "--grad_accum", "8").lr == pytest.approx(8**0.4 * lr, rel=0.02)
    assert plan(*few, "--set", "hidden_size=2048").lr == pytest.approx(lr / 4, rel=0.02)
    for horizon, steps in (("1", 0), ("1024000", 10), ("4096000", 40), ("12000000", 40)):
        assert plan("--target_tokens", horizon).warmup_steps == steps
    assert plan(*few, "--warmup_steps", "7").warmup_steps == 7
    assert (plan(model="1b").lr, plan(model="1b").warmup_steps) == (3e-4, 10)
    assert [plan("--target_tokens", str(4096 * steps)).eval_every for steps in (1, 91, 2930)] == [
        1,
        10,
        293,
    ]


# --------------------------------------------------------------------------------------------------
# Batch and horizon


@pytest.mark.parametrize(
    "ranks, flags, wanted",
    (
        (2, "--global_batch 4096 --micro_batch 4", (4, 16)),
        (1, "--global_batch 4096 --micro_batch 4", (4, 32)),
        (3, "--grad_accum 5", (1, 5)),
        (2, "--global_batch 4096 --micro_batch 4 --grad_accum 16", (4, 16)),
        (2, "--global_batch 4096 --grad_accum 16", (4, 16)),
        (2, "--global_batch 4096", (64, 1)),
        (3, "--global_batch 4096", "4,096 bytes are not a multiple of 96 "),
        (
            2,
            "--global_batch 4096 --micro_batch 4 --grad_accum 4",
            "ranks. times --micro_batch 4 times --grad_accum 4",
        ),
        (1, "--global_batch 4096 --micro_batch 3", "times --micro_batch 3"),
    ),
)
def test_the_batch_of_all_ranks_is_split_into_micro_steps(ranks, flags, wanted, monkeypatch):
    world, args = world_of(), parsed("--model", "tiny", "--seq_len", "32", *flags.split())
    world.ranks = ranks
    monkeypatch.setattr(world, "all", lambda holds: holds)
    monkeypatch.setattr(world, "on_rank0", lambda work: work())
    if isinstance(wanted, str):
        with pytest.raises(UsageError, match=wanted):
            train.settle(args, world)
    else:
        plan = train.settle(args, world)
        assert (plan.micro_batch, plan.grad_accum) == wanted
        assert plan.step_bytes == plan.global_batch == wanted[0] * wanted[1] * ranks * 32


def test_a_resumed_run_keeps_the_split_that_was_chosen_for_it():
    state = dict(cfg=asdict(SpiderConfig.preset("tiny")), flags=dict(micro_batch=16))
    plan = settled(
        "--model", "tiny", "--seq_len", "32", "--global_batch", "4096", state=state, resumes=True
    )
    assert (plan.micro_batch, plan.grad_accum) == (16, 8)


def test_the_horizon_is_bytes_or_flops_or_bytes_per_parameter():
    with torch.device("meta"):
        model = Spider(SpiderConfig.preset("tiny"))
    dense = sum(
        p.numel()
        for key, p in model.named_parameters()
        if not key.endswith(("table.weight", "followed"))
    )
    cost = estimate.flops_per_byte(model, model.config.bytes_per_segment, 1, 64)
    for argv, expected in (
        (["--target_tokens", "77"], 77),
        (["--target_param_data_ratio", "2.5"], math.ceil(2.5 * dense)),
        (["--target_flops", "1e-320"], 1),
        (["--target_flops", "1e9"], math.ceil(1e9 / cost)),
        (["--target_flops", "1.7e308"], (1 << 62) - 1),
        (["--target_param_data_ratio", "1.7e308"], (1 << 62) - 1),
    ):
        assert settled("--model", "tiny", *argv, "--seq_len", "64").target_tokens == expected


def test_minutes_are_a_horizon_from_the_measured_rate_that_a_resume_keeps(
    tmp_path, shards, monkeypatch
):
    """A plain number in the checkpoint; the rate is measured only at the start."""
    rates = [1000.0]
    monkeypatch.setattr(train, "time_steps", lambda *_: rates.pop())
    flags = ("--minutes", "0.03", "--ckpt_every", "5")
    argv = run_flags(shards, tmp_path / "run", *flags, steps=3)
    assert train.command_line(argv) == 0
    horizon = final_state(tmp_path / "run")["flags"]["target_tokens"]
    assert type(horizon) is int and 0.7 * 1800 < horizon <= 1800 and not rates
    assert train.command_line([*argv, "--max_steps", "0", "--eval_tokens", "77"]) == 0
    state = final_state(tmp_path / "run")
    assert state["flags"]["eval_tokens"] == 77
    assert state["step"] == math.ceil(horizon / 64) and state["flags"]["target_tokens"] == horizon


def test_other_minutes_than_those_of_the_run_are_refused(tmp_path, shards, monkeypatch, capsys):
    """They chose its horizon: a run of other flags, or of other minutes, would go on unasked."""
    argv = run_flags(shards, tmp_path / "run", "--eval_every", "0", steps=1)
    assert train.command_line(argv) == 0
    assert "started without --minutes: leave it out" in refused(
        [*argv, "--minutes", "0.03"], capsys
    )
    argv = run_flags(shards, tmp_path / "timed", "--eval_every", "0", "--minutes", "0.03", steps=1)
    assert train.command_line(argv) == 0
    assert "started for --minutes 0.03: give that" in refused([*argv, "--minutes", "0.05"], capsys)
    assert train.command_line([*argv, "--max_steps", "2"]) == 0
    assert final_state(tmp_path / "timed")["step"] == 2
    elsewhere = run_flags(
        shards, tmp_path / "new", "--minutes", "0.05", "--resume", str(tmp_path / "timed")
    )
    assert "add --reset_steps to start another" in refused(elsewhere, capsys)


def test_minutes_are_refused_on_several_ranks(tmp_path):
    world = world_of()
    world.ranks, world.join, world.on_rank0, world.all = (
        2,
        lambda *_: None,
        lambda work: work(),
        lambda agrees: agrees,
    )
    args = parsed(
        "--mock_data", "--dry_run", "--model", "tiny", "--minutes", "1", "--ckpt_dir", tmp_path
    )
    with (
        pytest.raises(UsageError, match="--minutes times steps on one process"),
        ExitStack() as closing,
    ):
        train.open_run(args, world, closing, Spider)


def test_a_run_of_minutes_resumes_with_the_evaluation_that_was_asked_for(tmp_path, shards, capsys):
    argv = run_flags(
        shards, tmp_path / "run", "--minutes", "0.03", "--eval_tokens", "9000", steps=1
    )
    assert train.command_line(argv) == train.command_line([*argv, "--max_steps", "2"]) == 0
    assert (
        "settings differ" not in capsys.readouterr().err
        and final_state(tmp_path / "run")["step"] == 2
    )


def test_a_checkpoints_model_and_the_horizon_of_its_minutes_are_kept_and_no_other_flag_is():
    config = replace(SpiderConfig.preset("tiny"), n_recurrent_layers=3)
    saved = dict(minutes=5.0, target_tokens=640_000, eval_tokens=4096, lr=0.5, seed=9)
    state = dict(cfg=asdict(config), flags=saved, recipe="tiny", n_loops=3)
    new = settled("--model", "tiny")
    for argv, resumes, horizon in (
        (("--minutes", "5"), True, (640_000, 4096)),
        ((), True, None),
        (("--minutes", "5", "--eval_tokens", "128"), True, (640_000, 128)),
        (("--minutes", "5"), False, None),
    ):
        plan = settled(*argv, state=state, resumes=resumes)
        assert (plan.target_tokens, plan.eval_tokens) == (
            horizon or (new.target_tokens, new.eval_tokens)
        )
        assert (plan.config, plan.n_loops, plan.seed) == (config, 3, new.seed)
    assert settled("--n_loops", "2", state=state).n_loops == 2


def test_tables_that_are_not_there_are_not_cleared():
    none = ("--model", "tiny", "--set", "engram_layers=,engram_byte_orders=")
    assert settled("--model", "tiny").engram_reset and not settled(*none).engram_reset
    with pytest.raises(UsageError, match="no Engram tables"):
        settled(*none, "--engram_reset")


@pytest.mark.parametrize("dry", (True, False))
def test_a_horizon_that_does_not_suit_data_or_steps_is_a_warning_with_the_remedy(
    tmp_path, shards, capsys, dry
):
    for flags, steps, warned in (
        (
            ("--target_tokens", "20000", "--warmup_steps", "0"),
            2,
            ("is 31 epochs", "--max_steps 2 ends the run"),
        ),
        (
            (
                "--target_tokens",
                "640",
                "--warmup_steps",
                "0",
                "--schedule",
                "cosine",
                "--min_lr_fraction",
                "0.1",
            ),
            5,
            # 0.1 + 0.45 * (1 + cos(0.4 * pi))
            ("ends the run at 69% of the peak", "over 10 steps"),
        ),
        (
            ("--target_tokens", "64", "--min_lr_fraction", "0.2"),
            3,
            ("the horizon of 1 steps", "rate, 2.00e-03"),
        ),
        (("--target_tokens", "128"), 2, ()),
    ):
        directory = tmp_path / f"run{steps}{len(warned)}"
        argv = run_flags(
            shards, directory, "--eval_every", "0", *flags, *["--dry_run"] * dry, steps=steps
        )
        assert train.command_line(argv) == 0
        said = "".join(capsys.readouterr())
        assert all(words in said for words in warned)
        assert (
            "use --target_tokens" in said
            or "use at most" in said
            or "raise --target_tokens for" in said
        ) == bool(warned)
