"""Schedules, optimizers, checkpoints, evaluation and the run itself, which ends the same however often it is cut."""

import json
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from conftest import awake, small_config, text

import data
import train
from train import Batch, Muon, Optimizers, RowwiseAdagrad, lr_factor, orthogonalize, parse_args

SMALL = ("hidden_size=32,n_prelude_layers=1,n_recurrent_layers=1,n_coda_layers=1,n_heads=2,q_lora_rank=16,"
         "kv_lora_rank=16,qk_nope_head_dim=8,qk_rope_head_dim=8,v_head_dim=16,intermediate_size=48,n_routed_experts=4,"
         "moe_intermediate_size=16,lora_rank=2,engram_layers=0,engram_heads=1,engram_rows=200,engram_dim=8,"
         "engram_byte_rows=300,engram_byte_dim=8")


@pytest.fixture
def shards(tmp_path):
    """A small directory of shards: 3 kB of documents to train on, some to validate."""
    directory = tmp_path / "data"
    directory.mkdir()
    generator = np.random.default_rng(0)
    for name, count in (("train-0.bin", 3000), ("val-0.bin", 700)):
        ids = generator.choice(np.frombuffer(b"abcdef gh", np.uint8), count).astype("<u2")
        ids[::211], ids[210::211] = 257, 258
        ids.tofile(directory / name)
    return directory


def run(tmp_path, shards, *flags, steps=6, ckpt="run", environ=None, monkeypatch=None):
    """Runs train.main with a small model; returns its checkpoint directory."""
    directory = tmp_path / ckpt
    argv = ["--data_dir", str(shards), "--seq_len", "32", "--micro_batch", "2", "--max_steps", str(steps),
            "--ckpt_every", "100", "--ckpt_dir", str(directory), "--set", SMALL, "--n_loops", "2",
            "--lr", "0.01", "--eval_every", "4", "--device", "cpu", *flags]
    assert train.command_line(argv) == 0
    return directory


def final_state(directory):
    return torch.load(train.find_checkpoints(directory)[-1][2], weights_only=True)


def metrics(directory):
    """Lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tok_per_sec"} for line in lines]


def assert_same(a, b, where=""):
    """Equality to the bit of nested states."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}/{i}")
    else:
        assert a == b, where


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and resumption

@pytest.mark.parametrize("flags", (
    (), ("--random_loops",), ("--grad_accum", "2"), ("--precision", "fp32", "--no_gradient_checkpointing"),
    ("--optimizer", "adamw"), ("--optimizer", "adamw8bit"), ("--moe_backend", "loop"), ("--engram_reset",),
    ("--schedule", "wsd", "--target_tokens", "700")), ids=" ".join)
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, shards, flags):
    """60 steps of two sequences are more than one epoch of 94; the cut at 50 lies in the second."""
    whole = run(tmp_path, shards, *flags, steps=60, ckpt="whole")
    run(tmp_path, shards, *flags, steps=50, ckpt="parts")
    parts = run(tmp_path, shards, *flags, steps=60, ckpt="parts")
    a, b = final_state(whole), final_state(parts)
    assert a["epoch"] >= 1 and a["step"] == 60
    # The interrupted run evaluated once more, at its provisional end.
    a.pop("best_loss"), b.pop("best_loss")
    assert_same(a, b)
    without_evaluation = [[{k: v for k, v in line.items() if not k.startswith("val")} for line in metrics(d)]
                          for d in (whole, parts)]
    assert without_evaluation[0] == without_evaluation[1]
    assert metrics(whole)[-1] == metrics(parts)[-1]


def test_a_run_that_was_killed_after_its_checkpoint_repeats_the_lost_steps(tmp_path, shards):
    whole = run(tmp_path, shards, steps=12, ckpt="whole")
    parts = run(tmp_path, shards, "--ckpt_every", "5", steps=12, ckpt="parts")
    (parts / "spider-step12.pt").unlink()
    run(tmp_path, shards, "--ckpt_every", "5", steps=12, ckpt="parts")
    assert_same(final_state(whole), final_state(parts))
    assert metrics(whole) == metrics(parts)


def test_checkpoints_hold_what_the_contract_names_and_only_plain_values(tmp_path, shards):
    state = final_state(run(tmp_path, shards))
    assert {"model_state_dict", "optimizer_state_dict", "step", "epoch", "cfg", "best_loss"} <= state.keys()
    assert state["step"] == 6 and state["cfg"]["hidden_size"] == 32 and math.isfinite(state["best_loss"])


def test_the_newest_checkpoints_of_a_run_are_kept(tmp_path, shards):
    directory = run(tmp_path, shards, "--ckpt_every", "1", "--keep_last", "3", steps=7)
    assert {path.name for path in directory.glob("*.pt")} == {f"spider-step{n}.pt" for n in (5, 6, 7)}


def test_reset_steps_takes_the_weights_alone_and_later_runs_go_on_from_the_reset(tmp_path, shards):
    directory = run(tmp_path, shards, steps=6)
    reset = run(tmp_path, shards, "--resume", str(directory / "spider-step6.pt"), "--reset_steps", steps=2)
    state = torch.load(reset / "spider-step2.pt", weights_only=True)
    assert state["step"] == 2 and state["bytes_seen"] == 2 * 2 * 32
    assert [line["step"] for line in metrics(reset)] == [1, 2]
    on = run(tmp_path, shards, steps=3)                    # goes on from step 2 of the reset run, not from step 6
    assert (on / "spider-step3.pt").exists() and (on / "spider-step6.pt").exists()


def test_a_damaged_checkpoint_is_passed_over_and_a_foreign_one_refused(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--ckpt_every", "3", steps=6)
    newest = directory / "spider-step6.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    run(tmp_path, shards, "--ckpt_every", "3", steps=6)
    assert "passed over" in capsys.readouterr().err and final_state(directory)["step"] == 6

    class Harmful:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")
    torch.save({"step": Harmful()}, tmp_path / "foreign.pt")
    assert train.command_line(["--resume", str(tmp_path / "foreign.pt"), "--data_dir", str(shards)]) == 2
    assert not (tmp_path / "harm").exists() and "cannot be read safely" not in capsys.readouterr().out


def test_a_run_that_starts_over_or_goes_back_leaves_the_files_of_the_one_before(tmp_path, shards):
    directory = run(tmp_path, shards, "--ckpt_every", "2", "--keep_last", "3", steps=6)
    old = {path: path.read_bytes() for path in (directory / f"spider-step{n}.pt" for n in (2, 4, 6))}
    by_hand = directory / "spider-step2-best.pt"
    by_hand.write_bytes(old[directory / "spider-step2.pt"])
    for flags in (("--reset_steps",), ()):                                                   # over, then back to step 2
        run(tmp_path, shards, "--ckpt_every", "1", "--resume", str(by_hand), *flags, steps=4)
    assert sum(path.read_bytes() in old.values() for path in directory.glob("*.pt")) == 4
    assert [line["step"] for line in metrics(directory)] == [3, 4] and len(list(directory.glob("metrics*"))) == 3
    on = run(tmp_path, shards, "--ckpt_every", "1", steps=5)                                 # goes on from the last run
    assert final_state(on)["step"] == 5 and final_state(on)["lineage"] == 2


def test_a_larger_batch_goes_on_to_the_same_number_of_bytes_and_says_what_changed(tmp_path, shards, capsys):
    run(tmp_path, shards, "--target_tokens", "640", steps=5)
    directory = run(tmp_path, shards, "--target_tokens", "640", "--micro_batch", "4", steps=0)
    state = final_state(directory)
    assert state["bytes_seen"] == 5 * 64 + 3 * 128 and state["step"] == 8
    assert "--micro_batch was 2, is 4" in capsys.readouterr().err


def test_a_line_of_metrics_that_a_kill_cut_short_is_dropped(tmp_path, shards):
    directory = run(tmp_path, shards, steps=2)
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    run(tmp_path, shards, steps=4)
    assert [line["step"] for line in metrics(directory)] == [1, 2, 3, 4]


def test_loops_of_a_run_stay_its_own_when_it_goes_on(tmp_path, shards):
    directory = run(tmp_path, shards, "--n_loops", "3", steps=1)
    flags = ["--data_dir", str(shards), "--seq_len", "32", "--micro_batch", "2", "--ckpt_dir", str(directory),
             "--eval_every", "0", "--device", "cpu"]
    assert train.command_line([*flags, "--max_steps", "2", "--n_loops", "5"]) == 0
    assert train.command_line([*flags, "--max_steps", "3"]) == 0
    state = final_state(directory)
    assert state["step"] == 3 and state["n_loops"] == 5 and state["cfg"]["n_loops"] == 3


@pytest.mark.parametrize("change,complaint", (
    (dict(cfg={"dim": 3}), "unexpected keyword"), (dict(cfg=None), "cfg"),
    (dict(model_state_dict={}), "weights differ")))
def test_a_checkpoint_of_another_program_is_refused_with_the_difference(tmp_path, shards, change, complaint, capsys):
    directory = run(tmp_path, shards, steps=1)
    foreign = tmp_path / "foreign.pt"
    torch.save(final_state(directory) | change, foreign)
    assert train.command_line(["--resume", str(foreign), "--data_dir", str(shards)]) == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_another_model_than_the_checkpoints_is_refused_with_the_difference(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=1)
    argv = ["--data_dir", str(shards), "--ckpt_dir", str(directory), "--set", SMALL + ",hidden_size=64"]
    assert train.command_line(argv) == 2
    assert "hidden_size 32 there, 64 asked for" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Schedules and optimizers

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


def test_orthogonalize_moves_singular_values_towards_one_for_every_matrix_of_a_stack():
    sizes = torch.tensor([1, 1e-3, 1e3])[:, None, None]
    stack = torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(0)) * sizes
    for matrices in (stack, stack.mT):
        out = orthogonalize(matrices).float()
        values = torch.linalg.svdvals(out)
        assert values.min() > 0.4 and values.max() < 1.4
        assert (torch.nn.functional.cosine_similarity(out.flatten(1), matrices.flatten(1)) > 0.8).all()


def test_muon_treats_a_stack_as_its_matrices_and_follows_torchs_own():
    generator = torch.Generator().manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(2, 24, 16, generator=generator))
    singles = [torch.nn.Parameter(m.clone()) for m in stack.detach()]
    others = [torch.nn.Parameter(m.clone()) for m in stack.detach()]
    settings = dict(lr=0.1, momentum=0.95, weight_decay=0.1)
    optimizers = [Muon([stack], **settings), Muon(singles, **settings),
                  torch.optim.Muon(others, adjust_lr_fn="match_rms_adamw", **settings)]
    for _ in range(3):
        grad = torch.randn(2, 24, 16, generator=generator)
        stack.grad = grad.clone()
        for i, (ours, theirs) in enumerate(zip(singles, others)):
            ours.grad, theirs.grad = grad[i].clone(), grad[i].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stack.detach(), torch.stack([p.detach() for p in singles]))
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in others]), rtol=0, atol=2e-3)


def test_rowwise_adagrad_touches_looked_up_rows_only_and_scales_by_their_past():
    table = torch.nn.Parameter(torch.zeros(5, 3))
    optimizer = RowwiseAdagrad([table], lr=0.5)
    for expected in (0.5, 0.5 / 2 ** 0.5):
        before = table.detach().clone()
        torch.nn.functional.embedding(torch.tensor([2]), table, sparse=True).sum().mul(7).backward()
        optimizer.step()
        optimizer.zero_grad()
        step = before - table.detach()
        torch.testing.assert_close(step[2], torch.full((3,), expected))
        assert not step[[0, 1, 3, 4]].any()
    optimizer.reset()
    assert not table.any() and not optimizer.state[table]


@pytest.mark.parametrize("name", ("adamw", "adamw8bit", "muon"))
def test_every_parameter_is_trained_once_tables_at_five_times_the_rate_without_decay(name):
    model = awake(small_config())
    optimizers = Optimizers(model, name, parse_args([]))
    owned = [p for part in optimizers.parts.values() for group in part.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    optimizers.set_lr(0.01, 1.0)
    tables = [id(m.weight) for m in model.modules() if isinstance(m, train.EngramTable)]
    for part in optimizers.parts.values():
        for group in part.param_groups:
            for p in group["params"]:
                assert group["lr"] == (0.05 if id(p) in tables else 0.01)
                assert not (group.get("weight_decay", 0) and (p.ndim < 2 or id(p) in tables))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    ids = text(4, 64)
    model(ids, ids, noise_seed=0).loss.backward()
    optimizers.step()
    for key, p in model.named_parameters():
        assert not torch.equal(before[key], p), key


def test_experts_and_hidden_matrices_go_to_muon_embeddings_head_and_router_do_not():
    model = awake(small_config())
    by_muon = {key for key, p in model.named_parameters() if train.is_matrix(key, p)}
    assert {"core.layers.0.moe.w_gate", "core.lora_up", "prelude.0.attention.q_a_proj.weight",
            "core.layers.1.engram.key_proj.weight", "engram_output.proj.weight"} <= by_muon
    assert not {"embed_tokens", "lm_head.weight", "core.layers.0.moe.router.weight", "core.loop_embedding",
                "engram_output.gate.weight", "engram_input.table.weight", "core.halt_predictor.weight"} & by_muon


# ---------------------------------------------------------------------------------------------------------------------
# Steps, loops, evaluation

def test_the_same_global_batch_gives_the_same_step_however_it_is_split():
    """Micro-steps see the rows, the noise and the mean that the whole batch has, also where rows are mostly PAD."""
    ids, labels = text(8, 32, seed=1), text(8, 32, seed=2)
    ids[:3, 5:], labels[:3, 4:] = train.tokenizer.PAD_ID, -100
    results = []
    for parts in (1, 2, 4):
        model = awake(small_config(aux_loss_weight=0.0, z_loss_weight=0.0, ponder_weight=0.0))
        args = parse_args(["--optimizer", "adamw", "--grad_clip", "0"])
        optimizers = Optimizers(model, "adamw", args)
        optimizers.set_lr(0.0, 0.0)
        size = 8 // parts
        batches = [Batch.of(ids[i:i + size], labels[i:i + size], 500 + i) for i in range(0, 8, size)]
        results.append(train.train_step(model, optimizers, batches, 2, args))
    for other in results[1:]:
        for key in ("loss", "grad_norm", "bytes_per_segment", "expert_balance"):
            assert other[key] == pytest.approx(results[0][key], rel=1e-4), key


def test_emptied_engram_rows_learn_as_at_the_start_not_less(tmp_path, shards):
    """At a zero row, a norm without a fitting eps multiplies the gradient by thousands, which Adagrad never forgets."""
    sums = []
    for reset in (False, True):
        model = awake(small_config())
        optimizers = Optimizers(model, "adamw", parse_args([]))
        optimizers.set_lr(1e-3, 1.0)
        if reset:
            optimizers.parts["engram"].reset()
        train.train_step(model, optimizers, [Batch.of(text(8, 32, seed=1), text(8, 32, seed=2), 0)], 2, parse_args([]))
        table = model.core.layers[1].engram.table.weight
        sums.append(float(optimizers.parts["engram"].state[table]["sum"].max()))
    assert sums[1] < 100 * sums[0]


def test_random_loop_counts_are_poisson_and_a_function_of_seed_and_step():
    args = parse_args(["--random_loops", "--seed", "3"])
    draws = [train.loops_of_step(args, 6, step) for step in range(2000)]
    assert draws == [train.loops_of_step(args, 6, step) for step in range(2000)]
    assert min(draws) >= 1 and abs(np.mean(draws) - 6) < 0.2 and abs(np.var(draws) - 6) < 0.6
    assert {train.loops_of_step(parse_args([]), 6, step) for step in range(9)} == {6}


def test_a_step_that_is_not_finite_touches_no_weight_and_ten_in_a_row_end_the_run(tmp_path, shards, capsys):
    model = awake(small_config())
    optimizers = Optimizers(model, "muon", args := parse_args([]))
    batch = [Batch.of(text(2, 32, seed=1), text(2, 32, seed=2), 0)]
    train.train_step(model, optimizers, batch, 2, args)
    with torch.no_grad():
        model.prelude[0].ffn.down_proj.weight[0, 0] = math.inf
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert train.train_step(model, optimizers, batch, 2, args)["skipped"]
    assert_same(before, dict(model.state_dict()))
    directory = run(tmp_path, shards, "--ckpt_every", "1", steps=2)
    state = {path: path.read_bytes() for path in directory.glob("*.pt")}
    capsys.readouterr()
    argv = ["--data_dir", str(shards), "--seq_len", "32", "--micro_batch", "2", "--max_steps", "40", "--device", "cpu",
            "--ckpt_dir", str(directory), "--lr", "1e30", "--grad_clip", "0", "--eval_every", "0", "--max_skipped", "3"]
    assert train.command_line(argv) == 1
    assert "lower --lr" in capsys.readouterr().err.splitlines()[-1]
    assert all(path.read_bytes() == data for path, data in state.items())
    assert None in [line["loss"] for line in metrics(directory)]


def test_evaluation_is_the_same_for_every_batch_size_and_changes_nothing():
    model = awake(small_config())
    source = data.mock_source(0)
    rows = data.validation_rows([source], 32, 1000)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    results = [train.evaluate(model, rows, size, 2, torch.device("cpu")) for size in (1, 3, 32)]
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)
    assert model.training and torch.equal(random_state, torch.get_rng_state())
    assert_same(before, dict(model.state_dict()))


def test_evaluating_sampling_and_saving_more_often_changes_no_weight(tmp_path, shards):
    plain = run(tmp_path, shards, "--eval_every", "0", ckpt="plain")
    busy = run(tmp_path, shards, "--eval_every", "1", "--sample_every", "2", "--ckpt_every", "2", ckpt="busy")
    assert_same(final_state(plain)["model_state_dict"], final_state(busy)["model_state_dict"])


def test_fp8_by_emulation_converts_the_right_linears_and_trains_like_bf16(tmp_path, shards):
    model = awake(small_config())
    names = {name for name, module in model.named_modules() if train.takes_fp8(module, name)}
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


@pytest.mark.parametrize("fp8,experts", ((False, False), (True, False), (True, True)))
def test_weights_cast_once_for_all_loops_and_micro_steps_give_the_same_gradient(fp8, experts, monkeypatch):
    """The casts are counted: with recomputation, two loops and two micro-steps, each Linear's weight once."""
    model = awake(small_config())
    model.compute_dtype, model.gradient_checkpointing = torch.bfloat16, True
    if fp8:
        train.convert_to_fp8(model, torch.device("cpu"), experts)
    ids, gradients, casts = text(2, 64), [], []
    for module in model.modules():
        if hasattr(module, "cast_weight"):
            monkeypatch.setattr(module, "cast_weight", lambda dtype, cast=module.cast_weight: casts.append(cast(dtype)))
    for scope in (nullcontext, model.cast_weights_once):
        model.zero_grad()
        with scope():
            for noise_seed in range(2):
                model(ids, ids, noise_seed=noise_seed).loss.backward()
        gradients.append({name: p.grad.to_dense().clone() for name, p in model.named_parameters()})
    assert len(casts) == sum(hasattr(module, "cast_weight") for module in model.modules())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0.03, atol=0.01 * float(gradient.abs().max()))


def test_a_step_sees_the_weights_of_the_step_before_not_their_old_casts():
    model = awake(small_config())
    model.compute_dtype = torch.bfloat16
    optimizers = Optimizers(model, "adamw", args := parse_args([]))
    optimizers.set_lr(0.1, 1.0)
    ids = text(2, 64)
    losses = [train.train_step(model, optimizers, [Batch.of(ids, ids, 0)], 2, args)["loss"] for _ in range(2)]
    assert losses[0] != losses[1] and all(getattr(m, "cast", None) is None for m in model.modules())


def test_evaluation_is_without_fp8():
    model, ids = awake(small_config()), text(2, 64)
    model.compute_dtype = torch.bfloat16
    plain = [model.train(mode)(ids, noise_seed=0).logits for mode in (True, False)]
    train.convert_to_fp8(model, torch.device("cpu"), experts=True)
    converted = [model.train(mode)(ids, noise_seed=0).logits for mode in (True, False)]
    assert not torch.equal(converted[0], plain[0]) and torch.equal(converted[1], plain[1])


def test_the_warm_up_passes_change_nothing():
    model = awake(small_config())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    train.warm_up(model, 2, 32, 2, torch.device("cpu"))
    assert torch.equal(random_state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    assert_same(before, dict(model.state_dict()))


@pytest.mark.slow
def test_compilation_settles_although_the_number_of_segments_changes():
    """Recomputation, loops and steps of many sizes share the graphs of the first few steps."""
    torch._dynamo.reset()
    args = parse_args(["--compile"])
    with torch.device("meta"):
        model = train.Spider(small_config())
    train.make_real(model, torch.device("cpu"), "fp32", "grouped", args)
    optimizers = Optimizers(model, "adamw", args)
    graphs, rates = [], set()
    for step in range(10):
        with torch.no_grad():
            model.boundary_predictor[2].bias.fill_((-2.0, 0.5, -1.0)[step % 3])
        ids = text(4, 128, seed=step)
        rates.add(train.train_step(model, optimizers, [Batch.of(ids, ids, step)], 2, args)["bytes_per_segment"])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert max(rates) > 1.5 * min(rates) and graphs[0] > 0 and graphs[4] == graphs[9]


@pytest.mark.slow
def test_one_step_of_the_1b_model_runs_in_bf16(tmp_path):
    """64 bytes, micro-batch 1, within the 24 GB of this machine."""
    directory = tmp_path / "run"
    argv = ["--mock_data", "--model", "1b", "--precision", "bf16", "--seq_len", "64", "--micro_batch", "1",
            "--max_steps", "1", "--eval_every", "0", "--ckpt_dir", str(directory), "--device", "cpu"]
    assert train.command_line(argv) == 0
    line, = metrics(directory)
    assert 4 < line["loss"] < 8 and math.isfinite(line["grad_norm"])
    assert train.peak_memory(torch.device("cpu")) < 24
