"""The stages from flags to the plan of a run: tables of values in and out."""

from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

import train
from conftest import final_state, metrics, on_meta, resolved, world_of
from data import Loader
from preparing import source
from spider import machine
from spider.config import SpiderConfig
from spider.errors import UsageError
from spider.training import plan, resolve
from spider.training.checkpoint import FROM_SCRATCH, StartCheckpoint
from spider.training.resolve import (
    horizon_warnings,
    splits_of,
    with_minutes,
    with_recipe,
    with_split,
)
from tile_moe import KERNELS
from train import RECIPES, Flags, parse_args

TINY = SpiderConfig.preset("tiny")


def start(resumes=True, config=TINY, **state) -> StartCheckpoint:
    """Return a checkpoint without weights."""
    saved = dict(cfg=asdict(config), n_loops=config.n_loops) | state
    return StartCheckpoint("run/spider-step5.pt", saved, resumes)


def command(text: str) -> plan.CommandLine:
    return parse_args(text.split(), {})


# --------------------------------------------------------------------------------------------------
# Recipe and model


# whether a device has bf16, and its memory
CPU = "cpu", True, 1e12
L4 = "cuda", True, 23.6e9
RTX_8000 = "cuda", False, 48e9
RTX_5080 = "cuda", True, 16e9


@pytest.mark.parametrize(
    "model, checkpoint, device, recipe",
    (
        ("auto", FROM_SCRATCH, CPU, "tiny"),
        ("auto", FROM_SCRATCH, L4, "1b"),
        ("auto", FROM_SCRATCH, RTX_8000, "tiny"),  # 1b would take weeks
        ("auto", FROM_SCRATCH, RTX_5080, "tiny"),  # 1b would not fit
        ("auto", start(recipe="small"), L4, "small"),
        ("auto", start(), CPU, "tiny"),
        ("base", start(recipe="small"), CPU, "base"),
    ),
)
def test_recipe_comes_from_flag_then_checkpoint_then_device(
    monkeypatch, model, checkpoint, device, recipe
):
    name, has_bf16, memory = device
    monkeypatch.setattr(machine, "has_bf16", lambda _: has_bf16)
    monkeypatch.setattr(machine, "memory_of", lambda _: memory)
    assert resolve.recipe_of(model, checkpoint, torch.device(name)) == recipe


@pytest.mark.parametrize(
    "argv, checkpoint, expected",
    (
        # the checkpoint's loops, and no other flag
        ("", start(n_loops=3, flags=dict(seed=9, lr=0.5)), dict(n_loops=3, seed=0, lr=Flags.lr)),
        ("--n_loops 2", start(n_loops=3), dict(n_loops=2)),
    ),
)
def test_recipe_sets_flags_that_are_not_given(argv, checkpoint, expected):
    flags = with_recipe(command(argv), RECIPES["tiny"], checkpoint)
    assert {name: getattr(flags, name) for name in expected} == expected


@pytest.mark.parametrize(
    "argv, resumes, target_tokens, eval_tokens",
    (
        ("--minutes 5", True, 640_000, 4096),
        ("--minutes 5 --eval_tokens 128", True, 640_000, 128),
        ("--minutes 5", False, 12_000_000, 262_144),
    ),
)
def test_resumed_minutes_run_keeps_its_horizon(argv, resumes, target_tokens, eval_tokens):
    recorded = dict(minutes=5.0, target_tokens=640_000, eval_tokens=4096)
    flags = with_recipe(command(argv), RECIPES["tiny"], start(resumes, flags=recorded))
    assert (flags.target_tokens, flags.eval_tokens) == (target_tokens, eval_tokens)


def test_minutes_are_refused_for_a_run_started_without_them():
    """They chose its horizon: another run would continue it unasked."""
    with pytest.raises(UsageError, match="without --minutes: leave the flag out"):
        resolve.check_minutes(replace(Flags(), minutes=0.05), {})


@pytest.mark.parametrize(
    "argv, complaint",
    (
        ("--set nonsense=1", "--set: .*not a field"),
        ("--set hidden=256", "--set: .*not a field.*: the nearest is hidden_size"),
        ("--set n_loops=2", "--set: .*not a field"),
        ("--set hidden_size=big", "--set: .*takes int"),
        ("--set act=maybe", "--set: .*true or false"),
        ("--set engram_layers=1+x", "--set: .*whole numbers"),
        ("--set v_head_dim=7", "--set: .*must equal"),
        ("--set engram_layers=,engram_byte_contexts= --engram_reset", "has no Engram tables"),
        ("--seq_len 96 --global_batch 4096", "4,096 bytes are not a multiple of 96 "),
        ("--global_batch 65536 --micro_batch 4 --grad_accum 2", "4 times --grad_accum 2"),
        ("--eval_every 0 --keep_best", "--keep_best needs the validation loss"),
        ("--eval_every 0 --patience 2", "--patience needs the validation loss"),
        (
            "--precision fp8 --fp8_experts --set n_routed_experts=0",
            "^--fp8_experts: .*no routed experts",
        ),
        (
            "--precision fp32 --fp8_experts",
            "^--fp8_experts needs --precision fp8; the precision is fp32",
        ),
    ),
)
def test_flags_that_contradict_each_other_or_the_model_are_refused(argv, complaint):
    with pytest.raises(UsageError, match=complaint):
        resolved("--model", "tiny", *argv.split())


@pytest.mark.parametrize(
    "settings, cleared", (("", True), ("engram_layers=,engram_byte_contexts=", False))
)
def test_engram_reset_is_off_for_models_without_tables(settings, cleared):
    assert resolved("--model", "tiny", f"--set={settings}").flags.engram_reset == cleared


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
def test_step_is_split_into_micro_steps_over_ranks(ranks, argv, first):
    flags, given, _ = command(f"--seq_len 32 {argv}")
    splits = splits_of(flags, given, ranks)
    assert (*splits[0].values(),) == first
    step_bytes = first[0] * first[1] * ranks * 32
    for split in splits:
        assert with_split(flags, split, ranks).global_batch == step_bytes


@pytest.mark.parametrize(
    "argv, sequences, length",
    (
        ("--seq_len 96", 1366, 96),  # 1365.3
        ("--seq_len 262144", 1, 262144),
        ("--micro_batch 8", 8, 2048),
    ),
)
def test_1b_uses_131072_bytes_per_step_unless_a_flag_sets_the_batch(
    argv, sequences, length, monkeypatch
):
    monkeypatch.setattr(machine, "memory_of", lambda *_: 1e12)
    flags = resolved("--model", "1b", *argv.split()).flags
    assert flags.micro_batch * flags.grad_accum == sequences
    assert flags.global_batch == sequences * length


def test_resumed_run_prefers_its_previous_split():
    flags, given, _ = command("--seq_len 32 --global_batch 4096")
    splits = splits_of(flags, given, 1, start(flags=dict(micro_batch=16)))
    assert splits[:2] == [
        dict(micro_batch=16, grad_accum=8),
        dict(micro_batch=128, grad_accum=1),
    ]


def test_few_of_thousands_of_splits_are_tried_including_the_smallest():
    """The number of bytes has 103,680 divisors; the memory of each split takes milliseconds."""
    flags, given, _ = command("--seq_len 32 --global_batch 897612484786617600")
    sizes = [split["micro_batch"] for split in splits_of(flags, given, 1)]
    assert 32 <= len(sizes) <= 64
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 50_000 and sizes[-1] == 1


# --------------------------------------------------------------------------------------------------
# Horizon


def of_horizon(argv: str, config=TINY) -> Flags:
    """Return the flags of `tiny` in steps of 4,096 bytes."""
    flags, given, _ = command(argv)
    flags = replace(flags, seq_len=64, n_loops=1, global_batch=4096)
    return resolve.with_horizon(flags, given, RECIPES["tiny"], on_meta(config))


def test_horizon_from_flops_or_parameters_is_clamped_to_the_flags_range():
    for argv, expected in (
        ("--target_flops 1e-320", 1),
        ("--target_flops 1.7e308", (1 << 62) - 1),
        ("--target_param_data_ratio 1.7e308", (1 << 62) - 1),
    ):
        assert of_horizon(argv).target_tokens == expected


def test_recipe_lr_halves_at_four_times_the_width_and_for_adamw():
    """Golden values have the rates by steps, and the rules for the other horizons."""
    one_step = "--target_tokens 4096"
    assert of_horizon(one_step, replace(TINY, hidden_size=512)).lr == 0.01
    for optimizer in ("adamw", "adamw8bit"):
        assert of_horizon(f"{one_step} --optimizer {optimizer}").lr == 0.01


def test_short_run_warms_up_in_six_steps_by_default():
    horizon = f"--target_tokens {91 * 4096}"
    assert of_horizon(horizon).warmup_steps == 6
    assert of_horizon(f"{horizon} --warmup_steps 7").warmup_steps == 7


@pytest.mark.parametrize(
    "argv, steps, held_out, eval_every, eval_tokens",
    (
        # ten of 262,144 bytes as long as a third of a million trained bytes, of 12 million
        ("", 2930, 10_000_000, 293, 262_144),
        # ten would be as long as 371,807 trained bytes, four as 148,723, of 1,003,520
        ("", 245, 111_542, 62, 262_144),
        # one would be as long as 37,181 trained bytes: a sixth is 17,066
        ("", 25, 111_542, 25, 51_200),
        ("", 25, 51_200, 25, 262_144),
        ("--eval_every 5", 25, 111_542, 5, 262_144),
        ("--eval_tokens 100000", 25, 111_542, 25, 100_000),
        ("--eval_tokens 1000", 25, 111_542, 3, 1000),
        ("--max_steps 5", 25, 111_542, 25, 51_200),
    ),
)
def test_evaluations_take_at_most_a_sixth_of_training_unless_a_flag_is_set(
    argv, steps, held_out, eval_every, eval_tokens
):
    """An evaluated byte takes a third of a trained one, and a step has 4,096 bytes."""
    words = f"--model tiny --target_tokens {4096 * steps} {argv}".split()
    flags = resolved(*words, held_out=held_out).flags
    assert (flags.eval_every, flags.eval_tokens) == (eval_every, eval_tokens)


@pytest.mark.parametrize(
    "resumes, recorded, eval_tokens",
    ((True, 1, 51_200), (True, 262_144, 262_144), (False, 262_144, 51_200)),
)
def test_run_resumed_from_before_the_limit_keeps_its_eval_tokens(resumes, recorded, eval_tokens):
    asked = resolved("--model", "tiny", "--target_tokens", str(25 * 4096))
    checkpoint = start(resumes, flags=dict(eval_tokens=recorded))
    flags = resolve.with_evaluations(asked, 111_542, checkpoint).flags
    assert (flags.eval_every, flags.eval_tokens) == (25, eval_tokens)


def test_minutes_include_the_time_of_evaluations():
    """At 1,000 bytes/s. An evaluated byte takes a third of a trained one."""

    def fitted(minutes: float, argv: str, held_out=70_000) -> tuple[int, int, int]:
        words = f"--model tiny --seq_len 100 --minutes {minutes} {argv}".split()
        flags = with_minutes(resolved(*words), held_out, 1000.0).flags
        return flags.target_tokens, flags.eval_every, flags.eval_tokens

    # four evaluations of a run of 600,000 bytes are subtracted, three suit what is left
    assert fitted(10, "") == (506_667, 1689, 262_144)
    # one, of half the bytes
    assert fitted(1, "") == (50_000, 500, 25_000)
    # given, it stays, of what there is
    seldom = "--eval_every 50000"
    assert fitted(10, f"--eval_tokens 1e6 {seldom}")[2] == 1_000_000
    # 600,000 / 5,000 evaluations; one at the end; none
    assert fitted(10, "--eval_tokens 1000 --eval_every 50") == (560_000, 50, 1000)
    assert fitted(10, f"--eval_tokens 1000 {seldom}")[0] == 599_667
    assert fitted(1, "--eval_every 0")[0] == 60_000
    assert fitted(1e-5, "--eval_every 0")[0] == 100  # a step


def test_run_makes_the_evaluations_that_its_recipe_can_afford(tmp_path, argv_of):
    """Of 300 held-out bytes, after steps of 64 bytes: ten would cost as much as 1,000 bytes, of
    2,560."""
    argv = argv_of("--model tiny --target_tokens 2560", steps=0)
    place = argv.index("--eval_every")
    del argv[place : place + 2]
    assert train.command_line(argv) == 0
    evaluated = [line["step"] for line in metrics(tmp_path / "run") if "val_loss" in line]
    assert evaluated == [10, 20, 30, 40]


def test_minutes_set_a_horizon_from_measured_speed_and_resume_keeps_it(
    train_small, error_of, new_log
):
    flags = "--minutes 0.003 --eval_every 0"
    horizon = final_state(train_small(flags, steps=1))["flags"]["target_tokens"]
    assert type(horizon) is int and horizon > 0
    state = final_state(train_small(flags, steps=2))
    assert (state["step"], state["flags"]["target_tokens"]) == (2, horizon)
    assert "settings differ" not in new_log()
    line = error_of(flags, "--minutes 0.05")
    assert "started with --minutes 0.003: give the same value to continue it" in line


# --------------------------------------------------------------------------------------------------
# Machine


@pytest.mark.parametrize(
    "asked, here, elsewhere, kept",
    (
        ("auto", "triton", "triton", "triton"),
        ("auto", "tile", "tile", "tile"),
        ("auto", "triton", "tile", "grouped"),
        ("triton", "triton", "tile", "triton"),
    ),
)
def test_auto_keeps_a_kernel_only_if_all_ranks_chose_it(monkeypatch, asked, here, elsewhere, kept):
    """Unlike GPUs may choose differently; every rank asks the others about each kernel in turn."""
    world = world_of()
    kernels = iter(KERNELS)
    world.all = lambda agrees: elsewhere == next(kernels) and agrees
    monkeypatch.setattr(resolve, "resolve_backend", lambda *_: (here, ""))
    flags = resolve.with_machine(replace(Flags(), moe_backend=asked), TINY, world)
    assert flags.moe_backend == kept


def test_expert_backend_is_chosen_for_the_compute_dtype(monkeypatch):
    dtypes = []

    def record(asked, device, config, dtype, compiles):
        dtypes.append(dtype)
        return "grouped", ""

    monkeypatch.setattr(resolve, "resolve_backend", record)
    for precision in ("fp32", "bf16", "fp8"):
        resolve.with_machine(replace(Flags(), precision=precision), TINY, world_of())
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16]


# --------------------------------------------------------------------------------------------------
# Warnings


@pytest.mark.parametrize(
    "argv, warned",
    (
        # 0.1 + 0.45 * (1 + cos(0.4 * pi))
        ("--target_tokens 640 --max_steps 5", ["ends at 69% of the peak rate: use --target_t"]),
        ("--target_tokens 640 --max_steps 9", []),  # at less than twice the minimum
        ("--target_tokens 640 --max_steps 10", []),
        ("--target_tokens 64 --max_steps 3", ["of 1 steps: later steps run at the minimum"]),
        (
            "--target_tokens 31872 --micro_batch 2",
            ["only 249 steps: fewer bytes per step (--global_batch 64,"],
        ),
        (
            "--target_tokens 256000 --micro_batch 30",
            ["only 134 steps: fewer bytes per step (--global_batch 256,"],
        ),
        ("--target_tokens 32000 --micro_batch 2", []),
        (
            "--target_tokens 640 --warmup_steps 10",
            ["step 10 is in the warm-up, at 91% of the peak: lower --warmup_steps to 2"],
        ),
        ("--target_tokens 640 --warmup_steps 9", []),
        (
            "--target_tokens 6400 --warmup_steps 99 --max_steps 5",
            ["step 5 is in the warm-up, at 5% of the peak: lower --warmup_steps to 1"],
        ),
    ),
)
def test_unsuitable_horizons_give_warnings(argv, warned):
    base = "--model 1b --seq_len 64 --micro_batch 1 --warmup_steps 0 --data_dir none"
    found = resolved(*base.split(), *argv.split())
    rate_of = partial(train.lr_factor, horizon=found.horizon, flags=found.flags)
    lines = horizon_warnings(found, 1.0, found.horizon, rate_of)
    for line, words in zip(lines, warned, strict=True):
        assert words in line


@pytest.mark.parametrize("target_tokens, warnings", ((4000, 0), (4001, 1)))
def test_more_than_twenty_epochs_of_a_source_give_a_warning(target_tokens, warnings):
    argv = f"--model tiny --seq_len 2 --warmup_steps 0 --target_tokens {target_tokens}"
    found = resolved(*argv.split())
    loader = Loader([source([0] * 1001, weight=0.5), source([0] * 101, weight=0.5)], 1, 0)
    epochs = train.epochs_in(found.flags.target_tokens, loader).max()
    lines = horizon_warnings(found, epochs, found.horizon, lambda step: 0.1)
    assert ["use --target_tokens 4000, or more" in line for line in lines] == [True] * warnings


@pytest.mark.parametrize("dry", ("", "--dry_run"))
def test_horizon_warnings_are_printed(train_small, capsys, dry):
    train_small("--target_tokens 20000 --eval_every 0", dry, steps=2)
    assert "31 epochs memorize" in "".join(capsys.readouterr())
