"""Schedules, the step, FP8 and evaluation."""

import json
import math
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import spider_model
import train
from conftest import (assert_same, awake, final_state, gradients, metrics, run, run_flags, settled, small_config, text)
from scripts import forked
from spider import errors
from spider.data.loader import Loader, validation_sets
from spider.data.shards import Shard, Source, Stream, mock_source
from spider.model.config import SpiderConfig
from spider.model.layers import Block
from spider.training import machine
from spider.training.batches import Batch
from spider.training.fp8 import convert_to_fp8, describe_fp8, takes_fp8
from spider.training.optimizers import Optimizers
from spider.training.plan import BatchShape, OptimizerSettings
from spider.training.ranks import World
from spider.training.stopping import Stopping
from spider_model import Spider
from train import lr_factor, parse_args, step_alone

# ---------------------------------------------------------------------------------------------------------------------
# Schedules

def test_schedules_warm_up_decay_and_end_at_the_floor():
    cosine = parse_args(["--warmup_steps", "10", "--min_lr_fraction", "0.1"])
    wsd = parse_args(["--schedule", "wsd", "--warmup_steps", "10", "--min_lr_fraction", "0.1"])
    for args in (cosine, wsd):
        factors = [lr_factor(step, 100, args) for step in range(120)]
        assert factors[0] == 1 / 11 and factors[10] == 1 and max(factors) == 1
        assert factors[100] == factors[119] == pytest.approx(0.1)
        assert all(a >= b for a, b in zip(factors[10:], factors[11:]))
    assert lr_factor(55, 100, cosine) == pytest.approx(0.55)
    assert lr_factor(80, 100, wsd) == 1 and lr_factor(91, 100, wsd) == pytest.approx(0.55)


def test_bytes_count_alike_in_both_cross_entropies_however_a_batch_is_cut():
    ids, sums, grads = text(2, 40), [], []
    labels = ids.clone()
    labels[1, 3:] = -100                  # three targets beside forty
    whole = [Batch.of(ids, labels, 0)]
    rows = [Batch.of(ids[i:i + 1], labels[i:i + 1], 0) for i in range(2)]
    for batches in (whole, rows):
        model = awake(small_config(boundaries="words", core_loss_weight=0.5, aux_loss_weight=0.0, z_loss_weight=0.0,
                                   ponder_weight=0.0))
        sums.append(train.accumulate(model, batches, 2)[0])
        grads.append(gradients(model))
    for name in ("loss", "total_loss", "core_loss"):
        assert sums[0][name] == pytest.approx(sums[1][name].item(), rel=1e-5)
    assert sums[0]["core_loss"] > 1
    for name, grad in grads[0].items():
        if grad is not None:
            torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Steps, loops, evaluation

def test_the_same_global_batch_gives_the_same_step_however_it_is_split():
    """Micro-steps see the rows, the noise and the mean that the whole batch has, also where rows are mostly PAD."""
    ids, labels = text(8, 32, seed=1), text(8, 32, seed=2)
    ids[:3, 5:], labels[:3, 4:] = train.tokenizer.PAD_ID, -100
    results = []
    for parts in (1, 2, 4):
        model = awake(small_config(aux_loss_weight=0.0, z_loss_weight=0.0, ponder_weight=0.0))
        optimizers = Optimizers(model, OptimizerSettings("adamw"))
        optimizers.set_lr(0.0, 0.0)
        size = 8 // parts
        batches = [Batch.of(ids[i:i + size], labels[i:i + size], 500 + i) for i in range(0, 8, size)]
        results.append(step_alone(model, optimizers, batches, 2))
    for other in results[1:]:
        for key in ("loss", "grad_norm", "bytes_per_segment", "expert_balance"):
            assert other[key] == pytest.approx(results[0][key], rel=1e-4), key


def test_a_module_that_a_researcher_adds_trains_from_values_of_its_own(tmp_path, shards, monkeypatch):
    class Mixed(Block):
        """Each byte sees the three before it through a convolution, which the model knows nothing of."""

        def __init__(self, config, attention_class):
            super().__init__(config, attention_class)
            self.conv = torch.nn.Conv1d(config.hidden_size, config.hidden_size, 4, padding=3, groups=config.hidden_size)

        def run(self, x, packing, cache=None):
            return super().run(x + self.conv(x.T)[:, :len(x)].T, packing, cache)

    def to_empty(self, **settings):
        """Memory is seldom empty."""
        for tensor in nn_to_empty(self, **settings).state_dict().values():
            tensor.fill_(3e35 if tensor.is_floating_point() else 3)
        return self
    nn_to_empty = torch.nn.Module.to_empty
    monkeypatch.setattr(spider_model.Spider, "block_class", Mixed)
    monkeypatch.setattr(torch.nn.Module, "to_empty", to_empty)
    directory = run(tmp_path, shards, "--precision", "fp32", "--dropout", "0", steps=30)
    assert metrics(directory)[-1]["loss"] < 3 < 5 < metrics(directory)[0]["loss"] < 6
    state = final_state(directory)
    weight = state["model_state_dict"]["prelude.0.conv.weight"]
    assert weight.shape == (32, 1, 4) and 0 < weight.abs().max() < 1
    by_muon = state["optimizer_state_dict"]["muon"]["state"].values()
    assert by_muon and not any(part["momentum_buffer"].shape == weight.shape for part in by_muon)


def test_emptied_engram_rows_learn_as_at_the_start_not_less(tmp_path, shards):
    """At a zero row, a norm without a fitting eps multiplies the gradient by thousands, which Adagrad never forgets."""
    sums = []
    for reset in (False, True):
        model = awake(small_config())
        optimizers = Optimizers(model, OptimizerSettings("adamw"))
        optimizers.set_lr(1e-3, 1.0)
        if reset:
            optimizers.reset_tables()
        step_alone(model, optimizers, [Batch.of(text(8, 32, seed=1), text(8, 32, seed=2), 0)], 2)
        table = model.core.layers[1].engram.table.weight
        sums.append(float(optimizers.by_name["engram"].state[table]["sum"].max()))
    assert sums[1] < 100 * sums[0]


def test_random_loop_counts_are_poisson_and_a_function_of_seed_and_step():
    schedule = settled("--random_loops", "--seed", "3", "--n_loops", "6").schedule
    draws = [train.loops_of_step(schedule, step) for step in range(2000)]
    assert draws == [train.loops_of_step(schedule, step) for step in range(2000)]
    assert min(draws) >= 1 and abs(np.mean(draws) - 6) < 0.2 and abs(np.var(draws) - 6) < 0.6
    assert {train.loops_of_step(settled("--n_loops", "6").schedule, step) for step in range(9)} == {6}


def test_a_step_that_is_not_finite_touches_no_weight_and_ten_in_a_row_end_the_run(tmp_path, shards, capsys):
    model = awake(small_config())
    optimizers = Optimizers(model)
    batch = [Batch.of(text(2, 32, seed=1), text(2, 32, seed=2), 0)]
    step_alone(model, optimizers, batch, 2)
    with torch.no_grad():
        model.prelude[0].ffn.down_proj.weight[0, 0] = math.inf
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert step_alone(model, optimizers, batch, 2)["skipped"]
    assert_same(before, dict(model.state_dict()))
    directory = run(tmp_path, shards, "--ckpt_every", "1", steps=2)
    state = {path: path.read_bytes() for path in directory.glob("*.pt")}
    capsys.readouterr()
    argv = ["--data_dir", str(shards), "--seq_len", "32", "--micro_batch", "2", "--max_steps", "40", "--device", "cpu",
            "--ckpt_dir", str(directory), "--lr", "1000", "--warmup_steps", "0", "--grad_clip", "0",
            "--eval_every", "0", "--max_skipped", "3"]
    assert train.command_line(argv) == 1
    assert "lower --lr" in capsys.readouterr().err.splitlines()[-1]
    assert all(path.read_bytes() == data for path, data in state.items())
    assert None in [line["grad_norm"] for line in metrics(directory)]


def test_evaluation_is_the_same_for_every_batch_size_and_changes_nothing():
    model = awake(small_config())
    source = mock_source(0)
    rows = validation_sets([source], 32, 1000)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    results = [train.evaluate(model, rows, size, 2, torch.device("cpu")) for size in (1, 3, 32)]
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)
    assert model.training and torch.equal(random_state, torch.get_rng_state())
    assert_same(before, dict(model.state_dict()))


def test_a_mixture_is_validated_source_by_source_and_as_a_whole(tmp_path, shards, capsys):
    """The second source is one byte again and again, which is soon predicted better."""
    (tmp_path / "same").mkdir()
    for name in ("train", "val"):
        np.full(400, 65, "<u2").tofile(tmp_path / "same" / f"{name}-0.bin")
    names = [str(shards), str(tmp_path / "same")]
    directory = run(tmp_path, shards, "--data_dir", f"{names[0]}:1,{names[1]}:3", "--eval_tokens", "400", steps=4)
    last = metrics(directory)[-1]
    own = [last[f"val_bpb/{name}"] for name in names]
    assert own[1] < own[0] and 400 * last["val_bpb"] == pytest.approx(100 * own[0] + 300 * own[1], rel=1e-3)
    assert f", {names[1]} {own[1]:.4f}" in capsys.readouterr().err
    assert not any("/" in name for line in metrics(run(tmp_path, shards, steps=1, ckpt="one")) for name in line)


def test_the_dry_run_prints_a_config_file_that_makes_the_same_run(tmp_path, shards, capsys):
    argv = run_flags(shards, tmp_path / "run", "--target_flops", "1e9", "--lr", "0.003", steps=2)
    assert train.command_line([*argv, "--dry_run", "config"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    again = settled("--config", str(tmp_path / "run.toml"))
    plan = settled(*argv)
    for part in ("config", "batch", "schedule", "optimizer", "output", "machine"):
        assert getattr(again, part) == getattr(plan, part), part


def test_evaluating_sampling_and_saving_more_often_changes_no_weight(tmp_path, shards):
    plain = run(tmp_path, shards, "--eval_every", "0", ckpt="plain")
    busy = run(tmp_path, shards, "--eval_every", "1", "--sample_every", "2", "--ckpt_every", "2", ckpt="busy")
    assert_same(final_state(plain)["model_state_dict"], final_state(busy)["model_state_dict"])


def test_fp8_by_emulation_converts_the_right_linears_and_trains_like_bf16(tmp_path, shards):
    model = awake(small_config())
    names = {name for name, module in model.named_modules() if takes_fp8(module, name)}
    assert "prelude.0.attention.q_a_proj" in names and "core.layers.0.moe.shared.down_proj" in names
    for word in ("engram", "lm_head", "router", "boundary_predictor", "halt_predictor"):
        assert not any(word in name for name in names)
    flags = ("--moe_backend", "grouped", "--no_gradient_checkpointing")
    bf16 = run(tmp_path, shards, *flags, "--precision", "bf16", steps=8, ckpt="bf16")
    fp8 = run(tmp_path, shards, *flags, "--precision", "fp8", "--fp8_experts", steps=8, ckpt="fp8")
    assert abs(metrics(fp8)[-1]["loss"] - metrics(bf16)[-1]["loss"]) < 0.15
    assert final_state(fp8)["model_state_dict"].keys() == final_state(bf16)["model_state_dict"].keys()
    run(tmp_path, shards, *flags, "--precision", "bf16", steps=9, ckpt="fp8")                # and on in bf16
    run(tmp_path, shards, "--moe_backend", "loop", "--precision", "fp32", steps=10, ckpt="fp8")
    assert final_state(tmp_path / "fp8")["step"] == 10


@pytest.mark.parametrize("preset", ("tiny", "small"))
def test_the_line_of_fp8_names_routed_experts_where_there_are_any(preset):
    with torch.device("meta"):
        model = Spider(SpiderConfig.preset(preset))
    assert ("routed experts in bf16" in describe_fp8(model, False)) == (preset == "tiny")


@pytest.mark.parametrize("fp8,experts", ((False, False), (True, False), (True, True)))
def test_weights_cast_once_for_all_loops_and_micro_steps_give_the_same_gradient(fp8, experts, monkeypatch):
    """The casts are counted: with recomputation, two loops and two micro-steps, each Linear's weight once."""
    model = awake(small_config())
    model.compute_dtype, model.recompute = torch.bfloat16, "all"
    if fp8:
        convert_to_fp8(model, torch.device("cpu"), experts)
    ids, grads, casts = text(2, 64), [], []
    for module in model.modules():
        if hasattr(module, "cast_weight"):
            monkeypatch.setattr(module, "cast_weight", lambda dtype, cast=module.cast_weight: casts.append(cast(dtype)))
    for scope in (nullcontext, model.cast_weights_once):
        model.zero_grad()
        with scope():
            for noise_seed in range(2):
                model(ids, ids, noise_seed=noise_seed).loss.backward()
        grads.append({name: grad.clone() for name, grad in gradients(model).items()})
    assert len(casts) == sum(hasattr(module, "cast_weight") for module in model.modules())
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, rtol=0.03, atol=0.01 * float(gradient.abs().max()))


def test_a_step_sees_the_weights_of_the_step_before_not_their_old_casts():
    model = awake(small_config())
    model.compute_dtype = torch.bfloat16
    optimizers = Optimizers(model, OptimizerSettings("adamw"))
    optimizers.set_lr(0.1, 1.0)
    ids = text(2, 64)
    losses = [step_alone(model, optimizers, [Batch.of(ids, ids, 0)], 2)["loss"] for _ in range(2)]
    assert losses[0] != losses[1] and all(getattr(m, "cast", None) is None for m in model.modules())


def test_evaluation_is_without_fp8():
    model, ids = awake(small_config()), text(2, 64)
    model.compute_dtype = torch.bfloat16
    plain = [model.train(mode)(ids, noise_seed=0).logits for mode in (True, False)]
    convert_to_fp8(model, torch.device("cpu"), experts=True)
    converted = [model.train(mode)(ids, noise_seed=0).logits for mode in (True, False)]
    assert not torch.equal(converted[0], plain[0]) and torch.equal(converted[1], plain[1])


def test_the_warm_up_passes_change_nothing():
    model = awake(small_config())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    train.warm_up(model, BatchShape(32, 2), 2, torch.device("cpu"))
    assert torch.equal(random_state, torch.get_rng_state()) and set(gradients(model).values()) == {None}
    assert_same(before, dict(model.state_dict()))


@pytest.mark.slow
def test_one_step_of_the_1b_model_runs_in_bf16(tmp_path, processes):
    """64 bytes, micro-batch 1, within the 24 GB of this machine; in a process that returns its 15 GB."""
    argv = ["--mock_data", "--model", "1b", "--precision", "bf16", "--seq_len", "64", "--micro_batch", "1",
            "--max_steps", "1", "--eval_every", "0", "--ckpt_dir", "run", "--device", "cpu"]
    assert forked(processes, *argv, cwd=tmp_path).returncode == 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert 4 < line["loss"] < 8 and math.isfinite(line["grad_norm"]) and 4 < line["memory"] < 24


# ---------------------------------------------------------------------------------------------------------------------
# Recipes and horizons

def test_flag_then_environment_then_recipe_and_a_flag_undoes_a_recipes_switch():
    plan = settled("--model", "tiny", "--lr", "0.1", "--engram_reset", "off", environ={"SEQ_LEN": "64", "LR": "9"})
    assert (plan.schedule.lr, plan.batch.seq_len, plan.schedule.engram_reset) == (0.1, 64, False)
    assert (plan.batch.micro_batch, plan.n_loops) == (train.RECIPES["tiny"]["micro_batch"], 1)


def test_the_1b_recipe_has_the_originals_numbers_and_auto_takes_what_suits_or_what_a_checkpoint_had(monkeypatch):
    plan = settled("--model", "1b")
    assert (plan.batch.seq_len, plan.batch.micro_batch, plan.batch.grad_accum, plan.n_loops, plan.schedule.lr,
            plan.schedule.target_tokens, plan.output.ckpt_every) == (2048, 64, 1, 6, 3e-4, 10 ** 10, 50)
    monkeypatch.setattr(machine, "memory_of", lambda *_: 1.5e11)
    monkeypatch.setattr(train, "resolve_precision", lambda *_: ("bf16", ""))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert settled("--compile", "off", "--moe_backend", "loop", device="cuda").recipe == "1b"
    for saved, recipe in ((None, "tiny"), ("small", "small")):
        state = dict(recipe=saved, cfg=asdict(SpiderConfig.preset(recipe)))
        assert settled(state=saved and state).recipe == recipe


def test_every_recipe_names_flags_and_values_that_they_take():
    flags = {flag.name: flag for flag in train.FLAGS}
    for recipe in train.RECIPES.values():
        for name, value in recipe.items():
            parse = flags[name].parse
            assert callable(value) or (value is True if parse is None else parse(str(value)) == value)


def test_the_rate_of_a_small_recipe_falls_with_steps_and_width_and_warm_up_is_short_and_given_ones_stay():
    def schedule(*argv, model="tiny"):
        return settled("--model", model, *argv).schedule

    def rate(*argv, **other):
        return schedule(*argv, **other).lr
    few = ("--target_tokens", "4096000")                # a thousand steps
    assert rate(*few) == pytest.approx(0.00732, rel=0.01) and rate(*few, "--lr", "0.5") == 0.5
    assert rate("--target_tokens", "32768000") == pytest.approx(rate(*few) / 8 ** 0.4, rel=0.02)
    assert rate(*few, "--grad_accum", "8") == pytest.approx(8 ** 0.4 * rate(*few), rel=0.02)
    assert rate(*few, "--set", "hidden_size=2048") == pytest.approx(rate(*few) / 4, rel=0.02)
    assert rate(model="1b") == 3e-4
    for horizon, steps in (("1", 0), ("1024000", 10), ("4096000", 40), ("12000000", 40)):
        assert schedule("--target_tokens", horizon).warmup_steps == steps
    assert schedule(*few, "--warmup_steps", "7").warmup_steps == 7 and schedule(model="1b").warmup_steps == 10


@pytest.mark.parametrize("recipe", ("tiny", "small"))
def test_a_horizon_of_a_small_recipe_has_ten_evaluations(recipe):
    every = train.RECIPES[recipe]["eval_every"]
    for steps in (91, 245, 2930, 46_875):
        out = replace(settled().output, eval_every=every(SpiderConfig.preset(recipe), steps - 0.3), sample_every=0)
        assert out.pauses(1, steps) == 10
    assert every(None, 0.5) == 1


def test_halting_comes_in_over_an_eighth_of_the_horizon_wherever_the_run_stops(tmp_path, shards, monkeypatch):
    seen, accumulate = [], train.accumulate
    monkeypatch.setattr(train, "accumulate", lambda model, *rest: seen.append(model.halting_warmup) or accumulate(
        model, *rest))
    run(tmp_path, shards, "--warmup_steps", "0", "--target_tokens", str(32 * 64), steps=6)
    assert seen == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def mixture(*parts: tuple[int, float]) -> Loader:
    """A loader of sequences of one byte from sources of so many, by weight."""
    return Loader([Source(str(k), weight, Stream([Shard("memory", np.zeros(size + 1, np.uint16))]),
                                    None) for k, (size, weight) in enumerate(parts)], 1, 0)


def test_dropout_of_a_mixture_is_that_of_what_it_reads_again():
    loader, args = mixture((7000, 0.7), (300, 0.3)), SimpleNamespace(dropout=0.5)
    second, eighth = (next(g for g in range(10_000) if loader.epochs(g)[1] == epoch) for epoch in (1, 7))
    assert 700 < second < 1400            # its share of the first sequences is not to the digit 0.3
    at = [train.dropout_at(args, loader, g) for g in (0, second - 1, second, eighth, 10_000, 10 ** 6)]
    assert at == pytest.approx([0, 0, 0.5 * 0.3 * 0.1, 0.5 * 0.3 * 0.7, 0.5 * (0.7 * 0.1 + 0.3), 0.5])


def test_dropout_begins_with_the_second_epoch_and_is_all_there_in_the_eleventh(tmp_path, shards, monkeypatch):
    seen, accumulate = [], train.accumulate
    monkeypatch.setattr(train, "accumulate", lambda model, *rest: seen.append(model.dropout) or accumulate(
        model, *rest))
    lines = metrics(run(tmp_path, shards, "--dropout", "0.5", "--micro_batch", "20", "--eval_every", "0", steps=13))
    assert [line["epoch"] for line in lines] == [*range(13)]
    assert seen == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5, 0.5])


def test_the_horizon_is_bytes_or_flops_or_bytes_per_parameter_and_never_two_of_them():
    with torch.device("meta"):
        model = spider_model.Spider(SpiderConfig.preset("tiny"))
    dense = sum(p.numel() for key, p in model.named_parameters() if not key.endswith(("table.weight", "followed")))
    for argv, expected in ((["--target_tokens", "77"], 77),
                           (["--target_param_data_ratio", "2.5"], math.ceil(2.5 * dense)),
                           (["--target_flops", "1e-320"], 1), (["--target_param_data_ratio", "1e-320"], 1),
                           (["--target_flops", "1e9"], math.ceil(1e9 / model.flops_per_byte(
                               model.config.bytes_per_segment, 1, 64)))):
        assert settled(*argv, "--seq_len", "64").schedule.target_tokens == expected
    for name in ("target_flops", "target_param_data_ratio"):
        with pytest.raises(errors.UsageError, match=f"--{name}: a horizon of .* bytes is more than"):
            settled(f"--{name}", "1e308")
    with pytest.raises(errors.UsageError, match="--target_flops: --target_tokens already sets the horizon"):
        settled("--target_flops", "1", environ={"TARGET_TOKENS": "5"})


# ---------------------------------------------------------------------------------------------------------------------
# What a run says of evaluations and samples

def test_evaluations_and_samples_are_announced_and_samples_continue_a_prompt_or_held_out_text(tmp_path, shards,
                                                                                                capsys):
    for flags, start in (((), "(held-out text) "), (("--sample_prompt", "abc"), "abc"), (("--eval_every", "0"), "\\n")):
        run(tmp_path, shards, "--sample_every", "2", *flags, steps=2, ckpt="run" + "".join(flags))
        said = capsys.readouterr().err
        assert f"step 2 continues '{start}" in said and "sampling 200 bytes" in said
        assert ("evaluating on" in said) == ("--eval_every" not in flags)
    held_out = np.fromfile(shards / "val-0.bin", "<u2")[:10].tolist()
    run(tmp_path, shards, "--sample_every", "1", steps=1, ckpt="one")
    assert repr(train.tokenizer.decode(held_out))[1:-1] in capsys.readouterr().err


def test_tables_are_not_emptied_where_less_than_half_a_pass_is_left():
    loader = Loader([mock_source(0)], 100, 0)
    targets = int(loader.targets[0])
    for passes, emptied in ((1.3, []), (1.6, [1]), (3.4, [1, 2]), (3.6, [1, 2, 3])):
        plan = settled("--engram_reset", "--seq_len", "100", "--target_tokens", str(int(passes * targets)))
        starts = [epoch for epoch in (1, 2, 3) if epoch < passes and
                  train.empties_tables(plan, loader, epoch * int(loader.windows[0]))]
        assert starts == emptied
    plan = settled("--engram_reset", "off", "--target_tokens", str(9 * targets))
    assert not train.empties_tables(plan, loader, int(loader.windows[0]))


def test_tables_of_a_mixture_are_emptied_as_a_pass_over_it_begins_and_for_a_small_part_of_it_not_more_often():
    plan = SimpleNamespace(schedule=SimpleNamespace(engram_reset=True, target_tokens=5000), batch=BatchShape(1, 1))

    def emptied(loader):
        epochs = [loader.epoch(g) for g in range(5000)]
        return [g for g in range(1, 5000) if epochs[g] > epochs[g - 1] and train.empties_tables(plan, loader, g)]
    for times, begun in enumerate(emptied(mixture((500, 0.5), (500, 0.5))), 1):
        assert abs(begun - 1000 * times) < 100
    assert times == 4 and emptied(mixture((100_000, 0.9), (100, 0.1))) == []  # read five times over


def test_the_time_left_counts_evaluations_and_samples_to_come():
    out = settled("--eval_every", "4", "--sample_every", "10").output
    assert [out.pauses(step, 10) for step in (1, 3, 4, 8, 10)] == [4, 4, 4, 3, 2]
    stop = SimpleNamespace(asked=None, world=World(), patience=lambda seconds: nullcontext())
    stopping = Stopping(stop, None, 0, 10, 1)
    with stopping.pause(2):
        stopping.began -= 7000.0           # seconds that went by
    stopping.paused = 6000.0               # of which the pause took so many
    assert stopping.seconds_left(1, 4) == pytest.approx(9 * 1000.0 + 4 * 3000.0, abs=100)
