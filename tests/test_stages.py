"""The stages from flags to the plan of a run: tables of values in and out."""

import threading
from dataclasses import asdict, replace

import pytest
import torch

import train
from conftest import SMALL, final_state, metrics, refused, run_flags, settled, world_of
from data import Loader, mock_source
from spider import machine
from spider.checkpoint import FROM_SCRATCH, Origin
from spider.common import UsageError
from spider.config import SpiderConfig
from spider.run import RunProgress
from spider_model import Spider
from tile_moe import KERNELS
from train import RECIPES, CommandLine, Flags, Split, parse_args, time_steps

TINY = SpiderConfig.preset("tiny")


def origin(resumes=True, config=TINY, **state) -> Origin:
    """Return a checkpoint without weights."""
    return Origin("run/spider-step5.pt", dict(cfg=asdict(config)) | state, resumes)


def command(text: str) -> CommandLine:
    return parse_args(text.split(), {})


# --------------------------------------------------------------------------------------------------
# Recipe and model


@pytest.mark.parametrize(
    "model, checkpoint, device, recipe",
    (
        ("auto", FROM_SCRATCH, "cpu", "tiny"),
        ("auto", FROM_SCRATCH, "cuda", "1b"),
        ("auto", origin(recipe="small"), "cuda", "small"),
        ("auto", origin(), "cpu", "tiny"),
        ("base", origin(recipe="small"), "cpu", "base"),
    ),
)
def test_the_recipe_is_that_of_the_flag_the_checkpoint_or_the_device(
    model, checkpoint, device, recipe
):
    assert train.recipe_of(model, checkpoint, torch.device(device)) == recipe


def test_recipes_have_values_that_their_flags_take():
    for recipe in RECIPES.values():
        for name, value in recipe.values.items():
            word = f"--{name}" if value is True else f"--{name}={value}"
            assert getattr(command(word).flags, name) == value


@pytest.mark.parametrize(
    "argv, checkpoint, expected",
    (
        # the checkpoint's loops, and no other flag
        ("", origin(n_loops=3, flags=dict(seed=9, lr=0.5)), dict(n_loops=3, seed=0, lr=Flags.lr)),
        ("", origin(), dict(n_loops=TINY.n_loops)),
        ("--n_loops 2", origin(n_loops=3), dict(n_loops=2)),
    ),
)
def test_a_recipe_fills_in_what_is_not_given(argv, checkpoint, expected):
    flags = train.with_recipe(command(argv), "tiny", checkpoint)
    assert {name: getattr(flags, name) for name in expected} == expected


@pytest.mark.parametrize(
    "argv, resumes, target_tokens, eval_tokens",
    (
        ("--minutes 5", True, 640_000, 4096),
        ("--minutes 5 --eval_tokens 128", True, 640_000, 128),
        ("--minutes 5", False, 12_000_000, 262_144),
        ("", True, 12_000_000, 262_144),
    ),
)
def test_a_resumed_run_of_minutes_keeps_its_horizon(argv, resumes, target_tokens, eval_tokens):
    recorded = dict(minutes=5.0, target_tokens=640_000, eval_tokens=4096)
    flags = train.with_recipe(command(argv), "tiny", origin(resumes, flags=recorded))
    assert (flags.target_tokens, flags.eval_tokens) == (target_tokens, eval_tokens)


@pytest.mark.parametrize(
    "recorded, resume, remedy",
    (
        ({}, None, "started without --minutes: leave --minutes out to continue it"),
        (dict(minutes=0.03), None, "give --minutes 0.03 to continue it, or name a new --ckpt_dir"),
        (dict(minutes=0.03), "run", "or add --reset_steps and name a new --ckpt_dir"),
    ),
)
def test_other_minutes_than_those_of_the_run_are_refused(recorded, resume, remedy):
    """They chose its horizon: another run would continue it unasked."""
    with pytest.raises(UsageError, match=remedy):
        train.check_minutes(replace(Flags(), minutes=0.05, resume=resume), recorded)


def test_the_model_is_the_checkpoints_with_settings_that_keep_its_weights():
    saved = replace(TINY, n_recurrent_layers=3)
    flags = replace(Flags(), set="z_loss_weight=0.5")
    config = train.model_config(flags, "tiny", origin(config=saved))
    assert config == replace(saved, z_loss_weight=0.5)


@pytest.mark.parametrize(
    "argv, complaint",
    (
        ("--set nonsense=1", "--set: .*not a field"),
        ("--set n_loops=2", "--set: .*not a field"),
        ("--set hidden_size=big", "--set: .*takes int"),
        ("--set act=maybe", "--set: .*true or false"),
        ("--set engram_layers=1+x", "--set: .*whole numbers"),
        ("--set v_head_dim=7", "--set: .*must equal"),
        ("--set engram_layers=,engram_byte_orders= --engram_reset", "has no Engram tables"),
        ("--seq_len 96 --global_batch 4096", "4,096 bytes are not a multiple of 96 "),
        ("--global_batch 65536 --micro_batch 4 --grad_accum 2", "4 times --grad_accum 2"),
        ("--eval_every 0 --keep_best", "--keep_best needs the validation loss"),
        ("--eval_every 0 --patience 2", "--patience needs the validation loss"),
        ("--precision fp8 --fp8_experts --set n_routed_experts=0", "no routed experts"),
        ("--precision fp32 --fp8_experts", "needs --precision fp8; the precision is fp32"),
    ),
)
def test_flags_that_do_not_fit_together_or_the_model_are_refused(argv, complaint):
    with pytest.raises(UsageError, match=complaint):
        settled("--model", "tiny", *argv.split())


def test_tables_are_cleared_by_default_only_where_there_are_some():
    flags = replace(Flags(), engram_reset=True)
    assert train.with_tables(flags, {"engram_reset"}, has_tables=True).engram_reset
    assert not train.with_tables(flags, set(), has_tables=False).engram_reset


# --------------------------------------------------------------------------------------------------
# Batch


@pytest.mark.parametrize(
    "ranks, argv, first",
    (
        (2, "--global_batch 4096 --micro_batch 4", (4, 16)),
        (3, "--grad_accum 5", (64, 5)),
        (2, "--global_batch 4096 --grad_accum 16", (4, 16)),
        (2, "--global_batch 4096", (64, 1)),
    ),
)
def test_a_step_is_split_into_micro_steps_over_ranks(ranks, argv, first):
    flags, given, _ = command(f"--seq_len 32 {argv}")
    splits = train.splits_of(flags, given, ranks)
    assert splits[0] == first
    step_bytes = first[0] * first[1] * ranks * 32
    for split in splits:
        assert train.with_split(flags, split, ranks).global_batch == step_bytes


@pytest.mark.parametrize(
    "argv, sequences, length",
    (
        ("--model base --seq_len 256", 512, 256),
        ("--model 1b --seq_len 96", 1366, 96),  # 1365.3
        ("--model 1b --seq_len 262144", 1, 262144),
        ("--model 1b --grad_accum 2 --seq_len 16", 8192, 16),
        ("--model 1b --global_batch 4096 --micro_batch 1", 2, 2048),
    ),
)
def test_1b_and_base_take_131072_bytes_a_step_unless_a_flag_sets_the_batch(
    argv, sequences, length, monkeypatch
):
    monkeypatch.setattr(machine, "memory_of", lambda *_: 1e12)
    flags = settled(*argv.split()).flags
    assert flags.micro_batch * flags.grad_accum == sequences
    assert flags.global_batch == sequences * length


def test_a_resumed_run_prefers_its_split():
    flags, given, _ = command("--seq_len 32 --global_batch 4096")
    splits = train.splits_of(flags, given, 1, origin(flags=dict(micro_batch=16)))
    assert splits[:2] == [Split(16, 8), Split(128, 1)]


# --------------------------------------------------------------------------------------------------
# Horizon


def of_horizon(argv: str, config=TINY) -> Flags:
    """Return the flags of `tiny` in steps of 4,096 bytes."""
    flags, given, _ = command(argv)
    flags = replace(flags, seq_len=64, n_loops=1, global_batch=4096)
    with torch.device("meta"):
        model = Spider(config)
    return train.with_horizon(flags, given, "tiny", model)


def test_a_horizon_by_flops_or_parameters_is_within_the_bounds_of_its_flag():
    for argv, expected in (
        ("--target_flops 1e-320", 1),
        ("--target_flops 1.7e308", (1 << 62) - 1),
        ("--target_param_data_ratio 1.7e308", (1 << 62) - 1),
    ):
        assert of_horizon(argv).target_tokens == expected


def test_the_largest_rate_of_a_recipe_is_halved_by_a_fourfold_width_and_by_adamw():
    """Golden values have the rates by steps, and the rules for the other horizons."""
    one_step = "--target_tokens 4096"
    assert of_horizon(one_step, replace(TINY, hidden_size=512)).lr == 0.01
    for optimizer in ("adamw", "adamw8bit"):
        assert of_horizon(f"{one_step} --optimizer {optimizer}").lr == 0.01


def test_a_short_run_warms_up_in_six_steps_unless_a_flag_says_otherwise():
    horizon = f"--target_tokens {91 * 4096}"
    assert of_horizon(horizon).warmup_steps == 6
    assert of_horizon(f"{horizon} --warmup_steps 7").warmup_steps == 7


@pytest.mark.parametrize(
    "argv, expected",
    (
        (
            "--model small --target_tokens 12e6",
            "--lr 0.00337 follows from 2,930 steps and a width of 256",
        ),
        (
            "--model base --target_tokens 1e8",
            "--lr 0.00204 follows from 763 steps and a width of 2,048, extrapolated from runs "
            "of up to 2,930 steps and 256 wide (docs/results/learning.md)",
        ),
        ("--model original --target_tokens 1e9", None),
        ("--model original --lr 0.1", None),
        ("--model tiny --target_tokens 4e6 --lr 0.0019", None),
        (
            "--model tiny --target_tokens 4e6 --lr 0.0018",
            "--lr 0.0018: without it, the recipe would take 0.00739",
        ),
    ),
)
def test_the_log_says_what_a_computed_rate_follows_from_and_if_a_given_one_is_far_from_it(
    argv, expected
):
    plan = settled(*argv.split())
    lines = train.describe_plan(plan, command(argv), world_of())
    assert [line for line in lines if line.startswith("--lr")] == ([expected] if expected else [])


def test_a_run_fits_its_evaluations_into_its_minutes():
    """At 1,000 bytes/s. An evaluated byte takes a third of a trained one, all of them at most a
    quarter of the time."""
    held_out = len(mock_source(0).val)

    def fitted(minutes: float, argv: str) -> tuple[int, int]:
        words = f"--model tiny --seq_len 100 --minutes {minutes} {argv}".split()
        given = parse_args(words, {}).given
        plan = settled(*words)
        found = train.fit_into(minutes, plan, 1000.0, [mock_source(0)], given)
        return found["target_tokens"], found["eval_tokens"]

    # ten evaluations of a recipe
    assert fitted(1, "") == (45_000, 4500)
    assert fitted(10, "--eval_tokens 1000") == (600_000 - 10 * 1000 // 3 - 1, 1000)
    # given, it stays, of what there is
    assert fitted(10, "--eval_tokens 1e6") == (int(600_000 - 10 * held_out / 3), 1_000_000)
    # 600,000 / 5,000 evaluations; one at the end; none
    often = "--eval_tokens 1000 --eval_every 50"
    assert fitted(10, often) == (600_000 - 120 * 1000 // 3, 1000)
    seldom = "--eval_tokens 1000 --eval_every 50000"
    assert fitted(10, seldom) == (600_000 - 1000 // 3 - 1, 1000)
    assert fitted(1, "--eval_every 0")[0] == 60_000
    assert fitted(1e-5, "--eval_every 0")[0] == 100  # a step


def test_minutes_give_a_horizon_by_the_measured_rate_that_a_resume_keeps(tmp_path, shards, capsys):
    argv = run_flags(shards, tmp_path / "run", *"--minutes 0.003 --eval_every 0".split(), steps=1)
    assert train.command_line(argv) == 0
    horizon = final_state(tmp_path / "run")["flags"]["target_tokens"]
    assert type(horizon) is int and horizon > 0
    assert train.command_line([*argv, "--max_steps", "2"]) == 0
    state = final_state(tmp_path / "run")
    assert (state["step"], state["flags"]["target_tokens"]) == (2, horizon)
    assert "settings differ" not in capsys.readouterr().err
    assert "give --minutes 0.003" in refused([*argv, "--minutes", "0.05"], capsys)


# --------------------------------------------------------------------------------------------------
# Machine


@pytest.mark.parametrize(
    "asked, here, elsewhere, kept",
    (
        ("auto", "triton", "triton", "triton"),
        ("auto", "tile", "tile", "tile"),
        ("auto", "triton", "tile", "grouped"),
        ("auto", "grouped", "triton", "grouped"),
        ("triton", "triton", "tile", "triton"),
    ),
)
def test_auto_keeps_a_kernel_only_where_all_ranks_chose_it(
    monkeypatch, asked, here, elsewhere, kept
):
    """Unlike GPUs may choose differently; every rank asks the others about each kernel in turn."""
    world = world_of()
    kernels = iter(KERNELS)
    world.all = lambda agrees: elsewhere == next(kernels) and agrees
    monkeypatch.setattr(train, "resolve_backend", lambda *_: (here, ""))
    flags, _ = train.with_machine(replace(Flags(), moe_backend=asked), TINY, world)
    assert flags.moe_backend == kept


def test_the_expert_backend_is_chosen_for_the_dtype_of_the_products(monkeypatch):
    dtypes = []

    def resolve(asked, device, config, dtype, compiles):
        dtypes.append(dtype)
        return "grouped", ""

    monkeypatch.setattr(train, "resolve_backend", resolve)
    for precision in ("fp32", "bf16", "fp8"):
        train.with_machine(replace(Flags(), precision=precision), TINY, world_of())
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_the_precision_is_bf16_where_a_cpu_has_it():
    flags, _ = train.with_machine(Flags(), TINY, world_of())
    assert flags.precision == ("bf16" if machine.multiplies_bf16(world_of().device) else "fp32")


def test_minutes_are_refused_on_several_ranks(tmp_path, monkeypatch):
    world = world_of()
    world.ranks = 2
    world.join = lambda *_: None
    world.on_rank0 = lambda work: work()
    world.all = lambda agrees: agrees
    argv = f"--mock_data --dry_run --model tiny --minutes 1 --ckpt_dir {tmp_path}"
    with pytest.raises(UsageError, match="--minutes times steps on one process"):
        train.open_run(command(argv), world, None, Spider)


# --------------------------------------------------------------------------------------------------
# Other weights


def test_a_run_from_other_weights_evaluates_first_which_changes_no_step(
    trained, train_small, capsys
):
    """It is a line of the log alone."""
    begin = ("--reset_steps --resume", trained)
    directory = train_small(*begin, steps=3)
    before, first, after = capsys.readouterr().err.partition("before the first step:")
    val_loss = metrics(trained)[-1]["val_loss"]
    assert f"validation: loss {val_loss:.4f}" in after.partition("step 1/3")[0]
    train_small(*begin, steps=4)  # resumes
    assert first not in capsys.readouterr().err
    other = train_small(*begin, "--eval_every 0", steps=3, ckpt="other")
    assert first not in capsys.readouterr().err
    for line, of_other in zip(metrics(directory)[:3], metrics(other), strict=True):
        assert line["loss"] == of_other["loss"]


# --------------------------------------------------------------------------------------------------
# Warnings


@pytest.mark.parametrize(
    "argv, warned",
    (
        ("--target_tokens 3e7", ["is 30 epochs"]),  # of a megabyte
        # 0.1 + 0.45 * (1 + cos(0.4 * pi))
        ("--target_tokens 640 --max_steps 5", ["ends the run at 69% of the peak"]),
        ("--target_tokens 640 --max_steps 9", []),  # at less than twice the minimum
        ("--target_tokens 640 --max_steps 10", []),
        ("--target_tokens 64 --max_steps 3", ["of 1 steps: the steps after it run at the minimum"]),
        (
            "--target_tokens 31872 --micro_batch 2",
            ["only 249 steps: fewer bytes a step (--global_batch 64,"],
        ),
        (
            "--target_tokens 256000 --micro_batch 30",
            ["only 134 steps: fewer bytes a step (--global_batch 256,"],
        ),
        ("--target_tokens 32000 --micro_batch 2", []),
        (
            "--target_tokens 640 --warmup_steps 10",
            ["is 91% of the peak: lower --warmup_steps from"],
        ),
        ("--target_tokens 640 --warmup_steps 9", []),
        (
            "--target_tokens 6400 --warmup_steps 99 --max_steps 5",
            ["not over at step 5, where the learning rate is 5% of the peak: lower --warmup_steps"],
        ),
    ),
)
def test_a_horizon_that_does_not_suit_data_or_steps_is_a_warning(argv, warned):
    base = "--model 1b --seq_len 64 --micro_batch 1 --warmup_steps 0 --data_dir none"
    plan = settled(*base.split(), *argv.split())
    lines = train.horizon_warnings(plan, Loader([mock_source(0)], 32, 0), plan.horizon)
    for line, words in zip(lines, warned, strict=True):
        assert words in line


@pytest.mark.parametrize("dry", ((), ("--dry_run",)))
def test_warnings_of_the_horizon_are_printed(tmp_path, shards, capsys, dry):
    flags = "--target_tokens 20000 --eval_every 0".split()
    assert train.command_line(run_flags(shards, tmp_path / "run", *flags, *dry, steps=2)) == 0
    assert "is 31 epochs" in "".join(capsys.readouterr())


def test_steps_of_a_subclass_that_cannot_be_copied_are_timed(monkeypatch):
    class WithLock(Spider):
        def __init__(self, config):
            super().__init__(config)
            self.lock = threading.Lock()

    monkeypatch.setattr(train, "MIN_SECONDS_TIMED", 0)
    flags = f"--device cpu --compile off --seq_len 32 --set {SMALL}"
    plan = settled(*flags.split(), model_class=WithLock)
    assert time_steps(plan, world_of(), [mock_source(0)]) > 0


CONSTANT = "--schedule wsd --wsd_decay_fraction 0"


@pytest.mark.parametrize(
    "argv, before, step, warned",
    (
        (CONSTANT, None, 0, []),  # no step before
        (CONSTANT, 0.01 / 1.49, 10, []),
        (CONSTANT, 0.01 / 1.51, 10, ["rises from 6.62e-03 to 1.00e-02"]),
        # Its own warm-up: from a half to the whole of the rate.
        ("--warmup_steps 1", 0.005, 1, []),
        # Another one: to 10/21 of the rate.
        ("--warmup_steps 20", 0.00122, 10, ["rises from 1.22e-03 to 4.76e-03"]),
    ),
)
def test_a_rate_that_is_much_higher_than_before_is_a_warning(argv, before, step, warned):
    base = "--model tiny --seq_len 32 --target_tokens 1e7 --lr 0.01 --warmup_steps 0"
    plan = settled(*base.split(), *argv.split())
    progress = RunProgress(step=step, metrics=None if before is None else dict(lr=before))
    lines = train.rise_warnings(plan, progress, 1000)
    for line, words in zip(lines, warned, strict=True):
        assert words in line
