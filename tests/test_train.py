"""Schedules, the optimizer step, FP8, evaluation, samples."""

import inspect
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from bad_data import source
from conftest import (
    assert_same,
    awake,
    final_state,
    gradients,
    metrics,
    refused,
    run,
    run_flags,
    settled,
    small_config,
    text,
    world_of,
)
from data import Batch, Loader, mock_source, validation_sets
from jobs import forked
from spider.fp8 import convert_to_fp8, grad_scale, input_scale, takes_fp8
from spider.layers import Linear, rms_norm
from spider.optim import Optimizers
from train import lr_factor, step_alone


def batches_of(ids, labels, parts: int = 1) -> list[Batch]:
    """A batch in so many micro-steps."""
    size = len(ids) // parts
    return [
        Batch.of(ids[i : i + size], labels[i : i + size], 500 + i) for i in range(0, len(ids), size)
    ]


# --------------------------------------------------------------------------------------------------
# Schedules


def test_schedules_warm_up_decay_and_end_at_the_floor():
    base = ("--model", "1b", "--warmup_steps", "10", "--min_lr_fraction", "0.1")
    cosine, wsd = settled(*base), settled(*base, "--schedule", "wsd")
    for plan in (cosine, wsd):
        factors = [lr_factor(step, 100, plan) for step in range(120)]
        assert factors[0] == 1 / 11 and factors[10] == 1 and max(factors) == 1
        assert factors[100] == factors[119] == pytest.approx(0.1)
        assert all(a >= b for a, b in zip(factors[10:], factors[11:], strict=False))
    assert lr_factor(55, 100, cosine) == pytest.approx(0.55)
    assert lr_factor(80, 100, wsd) == 1 and lr_factor(91, 100, wsd) == pytest.approx(0.55)
    constant = settled(*base, "--schedule", "wsd", "--wsd_decay_fraction", "0")
    assert {lr_factor(step, 100, constant) for step in range(10, 120)} == {1}
    assert lr_factor(11, 11, cosine) == pytest.approx(0.1)  # one step after the warm-up


def test_random_loop_counts_are_poisson_and_a_function_of_seed_and_step():
    plan = settled("--random_loops", "--seed", "3", "--n_loops", "6")
    draws = [train.loops_of_step(plan, step) for step in range(2000)]
    assert draws == [train.loops_of_step(plan, step) for step in range(2000)]
    assert min(draws) >= 1 and abs(np.mean(draws) - 6) < 0.2 and abs(np.var(draws) - 6) < 0.6
    assert {train.loops_of_step(settled("--n_loops", "6"), step) for step in range(9)} == {6}


def seen_by_steps(monkeypatch, name) -> list:
    """Collect an argument of the model in every step."""
    seen, accumulate = [], train.accumulate

    def collect(*given):
        seen.append(inspect.signature(accumulate).bind(*given).arguments[name])
        return accumulate(*given)

    monkeypatch.setattr(train, "accumulate", collect)
    return seen


def test_halting_comes_in_over_an_eighth_of_the_horizon_wherever_the_run_stops(
    tmp_path, shards, monkeypatch
):
    seen = seen_by_steps(monkeypatch, "halting_warmup")
    run(tmp_path, shards, "--target_tokens", str(32 * 64), "--eval_every", "0", steps=6)
    assert seen == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_dropout_begins_with_the_second_epoch_and_is_complete_in_the_eleventh(
    tmp_path, shards, monkeypatch
):
    seen = seen_by_steps(monkeypatch, "dropout")
    lines = metrics(
        run(
            tmp_path,
            shards,
            "--dropout",
            "0.5",
            "--micro_batch",
            "20",
            "--eval_every",
            "0",
            steps=13,
        )
    )
    assert [line["epoch"] for line in lines] == [*range(13)]
    assert seen == pytest.approx(
        [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5, 0.5]
    )


def mixture(*parts: tuple[int, float]) -> Loader:
    """A loader of sequences of one byte from sources of so many, by weight."""
    return Loader([source([0] * (size + 1), weight=weight) for size, weight in parts], 1, 0)


def test_dropout_of_a_mixture_follows_the_epochs_of_its_sources():
    loader, plan = mixture((7000, 0.7), (300, 0.3)), SimpleNamespace(dropout=0.5)
    second, eighth = (
        next(g for g in range(10_000) if loader.epochs(g)[1] == epoch) for epoch in (1, 7)
    )
    assert 700 < second < 1400  # its share of the first sequences is not exactly 0.3
    at = [train.dropout_at(plan, loader, g) for g in (0, second - 1, second, eighth, 10_000, 10**6)]
    assert at == pytest.approx(
        [0, 0, 0.5 * 0.3 * 0.1, 0.5 * 0.3 * 0.7, 0.5 * (0.7 * 0.1 + 0.3), 0.5]
    )


def test_tables_are_cleared_as_an_epoch_begins_unless_less_than_half_of_it_is_left():
    loader = Loader([mock_source(0)], 100, 0)
    targets, windows = int(loader.targets[0]), int(loader.windows[0])
    for passes, cleared in ((1.3, []), (1.6, [1]), (3.4, [1, 2]), (3.6, [1, 2, 3])):
        plan = settled(
            "--engram_reset", "--seq_len", "100", "--target_tokens", str(int(passes * targets))
        )
        assert [
            epoch
            for epoch in (1, 2, 3)
            if epoch < passes and train.clears_tables(plan, loader, epoch * windows)
        ] == cleared
    plan = settled("--no-engram_reset", "--seq_len", "100", "--target_tokens", str(9 * targets))
    assert not train.clears_tables(plan, loader, windows)


def test_tables_of_a_mixture_are_cleared_once_a_pass_over_all_of_it():
    def cleared(loader, target=5000):
        plan = SimpleNamespace(engram_reset=True, target_tokens=target, seq_len=1)
        epochs = [loader.epoch(g) for g in range(5000)]
        return [
            g
            for g in range(1, 5000)
            if epochs[g] > epochs[g - 1] and train.clears_tables(plan, loader, g)
        ]

    equal = mixture((500, 0.5), (500, 0.5))
    for times, begun in enumerate(cleared(equal), 1):
        assert abs(begun - 1000 * times) < 100
    assert times == 4 and len(cleared(equal, 4650)) == 4 and len(cleared(equal, 4350)) == 3
    assert cleared(mixture((100_000, 0.9), (100, 0.1))) == []  # a small source is read five times


# --------------------------------------------------------------------------------------------------
# The step


def test_the_same_global_batch_gives_the_same_step_however_it_is_split():
    """Micro-steps see the rows, the noise and the mean of the whole batch, also where rows are
    mostly PAD: every byte weighs the same in both cross-entropies."""
    ids, labels = text(8, 32, seed=1), text(8, 32, seed=2)
    ids[:3, 5:], labels[:3, 4:] = train.tokenizer.PAD_ID, -100
    results = []
    for parts in (1, 2, 4):
        model = awake(
            small_config(
                core_loss_weight=0.5, aux_loss_weight=0.0, z_loss_weight=0.0, ponder_weight=0.0
            )
        )
        optimizers = Optimizers(model, "adamw")
        optimizers.set_lr(0.0, 0.0)
        results.append(step_alone(model, optimizers, batches_of(ids, labels, parts), 2))
    for other in results[1:]:
        for key in (
            "loss",
            "total_loss",
            "core_loss",
            "grad_norm",
            "bytes_per_segment",
            "expert_balance",
        ):
            assert other[key] == pytest.approx(results[0][key], rel=1e-4), key


def test_a_step_that_is_not_finite_changes_no_weight_and_several_in_a_row_end_the_run(
    tmp_path, shards, capsys
):
    model, batch = awake(small_config()), batches_of(text(2, 32, seed=1), text(2, 32, seed=2))
    optimizers = Optimizers(model)
    step_alone(model, optimizers, batch, 2)
    with torch.no_grad():
        model.prelude[0].ffn.down_proj.weight[0, 0] = math.inf
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert step_alone(model, optimizers, batch, 2)["skipped"]
    assert_same(before, dict(model.state_dict()))
    directory = run(tmp_path, shards, "--ckpt_every", "1", steps=2)
    saved = {path: path.read_bytes() for path in directory.glob("*.pt")}
    flags = (
        "--lr",
        "1000",
        "--warmup_steps",
        "0",
        "--grad_clip",
        "0",
        "--eval_every",
        "0",
        "--max_skipped",
        "3",
    )
    assert "lower --lr" in refused(run_flags(shards, directory, *flags, steps=40), capsys, status=1)
    assert all(path.read_bytes() == content for path, content in saved.items())
    assert [line["skipped"] for line in metrics(directory)][-3:] == [True] * 3 and metrics(
        directory
    )[-1]["step"] < 40
    assert None in [line["grad_norm"] for line in metrics(directory)]
    steps = metrics(directory)[-1]["step"]  # also where these steps are the last
    assert "lower --lr" in refused(
        run_flags(shards, directory, *flags, steps=steps), capsys, status=1
    )


def test_a_gradient_that_is_not_finite_changes_no_weight_though_the_loss_is():
    model, batch = awake(small_config()), batches_of(text(2, 32, seed=1), text(2, 32, seed=2))
    optimizers = Optimizers(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    numbers = step_alone(model, optimizers, batch, 2)
    assert numbers["skipped"] and math.isfinite(numbers["total_loss"])
    assert_same(before, dict(model.state_dict()))


def test_cleared_engram_rows_learn_as_at_the_start():
    """At a zero row, a norm without a fitting eps multiplies the gradient by thousands, which
    Adagrad never forgets."""
    sums = []
    for reset in (False, True):
        model = awake(small_config())
        optimizers = Optimizers(model, "adamw", lr=1e-3)
        if reset:
            optimizers.reset_tables()
        step_alone(model, optimizers, batches_of(text(8, 32, seed=1), text(8, 32, seed=2)), 2)
        table = model.core.layers[1].engram.table.weight
        sums.append(float(optimizers.by_name["engram"].state[table]["sum"].max()))
    assert sums[1] < 100 * sums[0]


@pytest.mark.slow
def test_one_step_of_the_1b_model_runs_in_bf16(tmp_path, processes):
    """64 bytes, in a process that returns its 15 GB. By 8-bit AdamW, since Muon's 18 TFLOP take
    minutes without AMX."""
    argv = [
        "--mock_data",
        "--model",
        "1b",
        "--precision",
        "bf16",
        "--seq_len",
        "64",
        "--micro_batch",
        "1",
        "--max_steps",
        "1",
        "--eval_every",
        "0",
        "--ckpt_dir",
        "run",
        "--device",
        "cpu",
        "--optimizer",
        "adamw8bit",
    ]
    status, _, log = forked(processes, tmp_path, *argv)
    assert status == 0, log
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert 4 < line["loss"] < 8 and math.isfinite(line["grad_norm"]) and 4 < line["memory"] < 24


# --------------------------------------------------------------------------------------------------
# FP8, casts, compilation


def test_fp8_by_emulation_converts_the_right_linears_and_trains_like_bf16(tmp_path, shards):
    names = {
        name for name, module in awake(small_config()).named_modules() if takes_fp8(module, name)
    }
    assert "prelude.0.attention.q_a_proj" in names and "core.layers.0.moe.shared.down_proj" in names
    for word in ("engram", "lm_head", "router", "boundary_predictor", "halt_predictor"):
        assert not any(word in name for name in names)
    flags = ("--moe_backend", "grouped", "--no_gradient_checkpointing", "--eval_every", "0")
    bf16 = run(tmp_path, shards, *flags, "--precision", "bf16", steps=8, ckpt="bf16")
    fp8 = run(tmp_path, shards, *flags, "--precision", "fp8", "--fp8_experts", steps=8, ckpt="fp8")
    assert abs(metrics(fp8)[-1]["loss"] - metrics(bf16)[-1]["loss"]) < 0.15
    assert (
        final_state(fp8)["model_state_dict"].keys() == final_state(bf16)["model_state_dict"].keys()
    )
    # any other resumes it
    run(tmp_path, shards, "--moe_backend", "loop", "--precision", "fp32", steps=9, ckpt="fp8")
    assert final_state(fp8)["step"] == 9


def test_a_run_leaves_products_of_fp32_without_tf32(tmp_path, shards):
    run(tmp_path, shards, "--precision", "bf16", steps=1)
    assert (
        torch.get_float32_matmul_precision() == "highest"
        and not torch.backends.cuda.matmul.allow_tf32
    )


@pytest.mark.parametrize("width, scale", ((4096, 4), (2048, 8), (768, 16), (320, 16), (128, 32)))
def test_the_scale_of_normed_inputs_is_the_largest_power_of_two_that_keeps_them_below_448(
    width, scale
):
    """rms_norm of a row with a single number other than 0 has the largest one that there is,
    sqrt(width)."""
    row = torch.zeros(1, width)
    row[0, 3] = 5
    largest = float(rms_norm(row, eps=0).amax())
    assert (
        input_scale(Linear(width, 16, normed_input=True)) == scale
        and largest * scale <= 448 < 2 * largest * scale
    )
    assert input_scale(Linear(width, 16)) is None


@pytest.mark.parametrize(
    "step_bytes, scale", ((4096, 2**20), (28_672, 2**23), (114_688, 2**25), (131_072, 2**25))
)
def test_the_scale_of_gradients_is_a_power_of_two_near_256_times_the_bytes_of_a_step(
    step_bytes, scale
):
    assert grad_scale(step_bytes) == scale and 2**-0.5 <= scale / (256 * step_bytes) <= 2**0.5


@pytest.mark.parametrize(
    "name", ("prelude.0.attention.q_a_proj", "coda.0.ffn.down_proj", "core.out_proj")
)
def test_an_infinite_gradient_in_fp8_skips_the_step(name):
    """Saturation must not make it finite."""
    model, ids = awake(small_config()), text(2, 64)
    model.compute_dtype = torch.bfloat16
    convert_to_fp8(model, torch.device("cpu"), experts=False, step_bytes=ids.numel())

    def overflow(grad):
        grad = grad.clone()
        grad[0, 0] = math.inf
        return grad

    model.get_submodule(name).register_forward_hook(
        lambda module, args, y: y.register_hook(overflow) and None
    )
    assert step_alone(model, Optimizers(model, "adamw"), batches_of(ids, ids), 2)["skipped"]


def test_a_biased_linear_in_fp8_adds_its_bias_in_training_as_in_evaluation():
    model, x = (
        awake(small_config()),
        torch.randn(16, 32, generator=torch.Generator().manual_seed(0)),
    )
    model.extra = Linear(32, 32, bias=True)
    with torch.no_grad():
        model.extra.weight.zero_()
        model.extra.bias.fill_(5)
    convert_to_fp8(model, torch.device("cpu"), experts=False, step_bytes=64)
    assert all((model.train(mode).extra(x) == 5).all() for mode in (True, False))


def test_a_row_in_fp8_does_not_depend_on_others_where_the_scale_is_known_beforehand():
    """A scale that is the largest number of all rows would round a row otherwise beside a larger
    one."""
    model = awake(small_config())
    convert_to_fp8(model, torch.device("cpu"), experts=False, step_bytes=64)
    attention, generator = model.prelude[0].attention, torch.Generator().manual_seed(0)
    for linear, alone_is_the_same in ((attention.q_a_proj, True), (attention.o_proj, False)):
        x = torch.randn(2, linear.in_features, generator=generator)
        upstream = torch.randn(2, linear.out_features, generator=generator) / 64
        results = []
        for factor in (1.0, 3.7):  # of the second row, in values and in gradients
            factors = torch.tensor([[1.0], [factor]])
            rows = (x * factors).requires_grad_()
            y = linear(rows)
            y.backward(upstream * factors)
            results.append((y[0].detach(), rows.grad[0]))
        (y, grad), (y_beside, grad_beside) = results
        assert torch.equal(y, y_beside) == alone_is_the_same
        assert torch.equal(grad, grad_beside)


@pytest.mark.parametrize("fp8, experts", ((False, False), (True, False), (True, True)))
def test_weights_cast_once_for_all_loops_and_micro_steps_give_the_same_gradient(
    fp8, experts, monkeypatch
):
    """The casts are counted: with recomputation, two loops and two micro-steps, each Linear's
    weight once."""
    model, ids = awake(small_config()), text(2, 64)
    model.compute_dtype, model.recompute = torch.bfloat16, "all"
    if fp8:
        convert_to_fp8(model, torch.device("cpu"), experts, ids.numel())
    grads, casts = [], []
    for module in model.modules():
        if hasattr(module, "cast_weight"):
            monkeypatch.setattr(
                module,
                "cast_weight",
                lambda dtype, cast=module.cast_weight: casts.append(cast(dtype)),
            )
    for scope in (nullcontext, model.cast_weights_once):
        model.zero_grad()
        with scope():
            for noise_seed in range(2):
                model(ids, ids, noise_seed=noise_seed).loss.backward()
        grads.append({name: grad.clone() for name, grad in gradients(model).items()})
    assert len(casts) == sum(hasattr(module, "cast_weight") for module in model.modules())
    for name, gradient in grads[0].items():
        torch.testing.assert_close(
            grads[1][name], gradient, rtol=0.03, atol=0.01 * float(gradient.abs().max())
        )


def test_a_step_sees_the_weights_of_the_step_before_not_their_old_casts():
    model, ids = awake(small_config()), text(2, 64)
    model.compute_dtype = torch.bfloat16
    optimizers = Optimizers(model, "adamw", lr=0.1)
    losses = [step_alone(model, optimizers, batches_of(ids, ids), 2)["loss"] for _ in range(2)]
    assert losses[0] != losses[1] and all(getattr(m, "cast", None) is None for m in model.modules())


def test_evaluation_does_not_use_fp8():
    model, ids = awake(small_config()), text(2, 64)
    model.compute_dtype = torch.bfloat16
    plain = [model.train(mode)(ids, noise_seed=0).logits for mode in (True, False)]
    convert_to_fp8(model, torch.device("cpu"), experts=True, step_bytes=ids.numel())
    converted = [model.train(mode)(ids, noise_seed=0).logits for mode in (True, False)]
    assert not torch.equal(converted[0], plain[0]) and torch.equal(converted[1], plain[1])


def test_the_warm_up_passes_change_nothing():
    model = awake(small_config())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    train.warm_up(
        model,
        settled("--micro_batch", "2", "--seq_len", "32", "--n_loops", "2"),
        torch.device("cpu"),
    )
    assert torch.equal(random_state, torch.get_rng_state()) and set(gradients(model).values()) == {
        None
    }
    assert_same(before, dict(model.state_dict()))


# --------------------------------------------------------------------------------------------------
# Evaluation and samples


def test_evaluation_is_the_same_for_every_batch_size_and_changes_nothing():
    model, rows = awake(small_config()), validation_sets([mock_source(0)], 32, 1000)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    results = [train.evaluate(model, rows, size, 2, world_of()) for size in (1, 3, 32)]
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
    directory = run(
        tmp_path,
        shards,
        "--data_dir",
        f"{names[0]}:1,{names[1]}:3",
        "--eval_tokens",
        "400",
        steps=4,
    )
    last = metrics(directory)[-1]
    own = [last[f"val_bpb/{name}"] for name in names]
    assert own[1] < own[0] and 400 * last["val_bpb"] == pytest.approx(
        100 * own[0] + 300 * own[1], rel=1e-3
    )
    assert f", {names[1]} {own[1]:.4f}" in capsys.readouterr().err
    assert not any(
        "/" in name for line in metrics(run(tmp_path, shards, steps=1, ckpt="one")) for name in line
    )


def test_samples_continue_a_prompt_or_held_out_text(tmp_path, shards, capsys):
    held_out = np.fromfile(shards / "val-0.bin", "<u2")[:10].tolist()
    beginning = repr(train.tokenizer.decode(held_out))[1:-1]
    for flags, start in (
        ((), beginning),
        (("--sample_prompt", "abc"), "abc'"),
        (("--eval_every", "0"), "\\n"),
    ):
        run(tmp_path, shards, "--sample_every", "2", *flags, steps=2, ckpt="run" + "".join(flags))
        assert f"step 2 continues '{start}" in capsys.readouterr().err


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_ruined_weights_are_reported_instead_of_sampled(tmp_path, shards, capsys, value):
    state = final_state(run(tmp_path, shards, steps=2))
    state["model_state_dict"]["lm_head.weight"][0, 0] = value
    torch.save(state, tmp_path / "ruined.pt")
    run(
        tmp_path,
        shards,
        "--resume",
        str(tmp_path / "ruined.pt"),
        "--sample_every",
        "1",
        steps=4,
        ckpt="new",
    )
    assert "step 3: no sample" in capsys.readouterr().err


def test_a_run_fits_its_evaluations_into_its_minutes():
    """At 1,000 bytes/s; an evaluated byte takes a third of a trained one, all of them at most a
    quarter of the time."""
    plan = settled("--model", "tiny", "--seq_len", "100", "--eval_tokens", "1000")
    found = train.fit_into(10, plan, 1000.0, [mock_source(0)], set())
    assert found == dict(target_tokens=600_000 - 10 * 1000 // 3 - 1, eval_tokens=1000)
    found = train.fit_into(
        1, settled("--model", "tiny", "--seq_len", "100"), 1000.0, [mock_source(0)], set()
    )
    assert found == dict(target_tokens=45_000, eval_tokens=4500)
    plan = settled("--model", "tiny", "--seq_len", "100", "--eval_every", "0")
    assert train.fit_into(1, plan, 1000.0, [mock_source(0)], set())["target_tokens"] == 60_000
    plan = settled(
        "--model", "tiny", "--seq_len", "100", "--eval_tokens", "1000", "--eval_every", "50"
    )
    # 600,000 / 5,000 evaluations
    found = train.fit_into(10, plan, 1000.0, [mock_source(0)], {"eval_every"})
    assert found == dict(target_tokens=600_000 - 120 * 1000 // 3, eval_tokens=1000)
    plan = settled(
        "--model", "tiny", "--seq_len", "100", "--eval_tokens", "1000", "--eval_every", "50000"
    )
    found = train.fit_into(10, plan, 1000.0, [mock_source(0)], {"eval_every"})  # one, at the end
    assert found == dict(target_tokens=600_000 - 1000 // 3 - 1, eval_tokens=1000)
    plan = settled("--model", "tiny", "--seq_len", "100", "--eval_tokens", "1000000")
    validation = len(mock_source(0).val)
    # given: it stays, of what there is
    found = train.fit_into(10, plan, 1000.0, [mock_source(0)], {"eval_tokens"})
    assert found == dict(target_tokens=int(600_000 - 10 * validation / 3), eval_tokens=1_000_000)
