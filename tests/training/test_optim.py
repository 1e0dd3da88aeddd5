"""Optimizers: Muon and its stacks, Adagrad for Engram tables, the parameters of each."""

import inspect
import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from conftest import awake, has_lookups, lookups_of, small_config, text
from data import Batch
from jobs import run_ranks
from spider.model.memory import EngramTable, tables_of
from spider.training import distributed, muon_ranks
from spider.training.optim import Optimizers, RowwiseAdagrad, kinds_of
from train import StepSettings, accumulate, train_step


def random_batch(sequences: int) -> list[Batch]:
    """Return a batch of random bytes in one micro-step."""
    return [Batch.of(text(sequences, 32, seed=1), text(sequences, 32, seed=2), 500)]


# --------------------------------------------------------------------------------------------------
# Muon


@pytest.mark.parametrize("backend, dtype", (("loop", "float32"), ("grouped", "bfloat16")))
def test_muon_leaves_idle_experts_and_unused_loop_adapters_unchanged(backend, dtype):
    """Neither their weights nor their momentum change; the rest of the stack moves."""
    model = awake(small_config(n_loops=3))
    model.set_backend(backend)
    model.compute_dtype = getattr(torch, dtype)
    optimizers = Optimizers(model, lr=0.01, weight_decay=0.5)
    core = model.core
    moe = core.layers[0].moe
    idle = {moe.w_gate: 1, moe.w_up: 1, moe.w_down: 1, core.lora_down: 2, core.lora_up: 2}

    def step(n_loops: int) -> dict:
        """Return (weight, momentum) of every matrix of the stacks after a step."""
        train_step(model, optimizers, random_batch(4), StepSettings(n_loops))
        found = {}
        for p in idle:
            momentum = optimizers.by_name["muon"].state[p]["momentum_buffer"]
            for i in range(len(p)):
                found[p, i] = (p[i].detach().clone(), momentum[i].clone())
        return found

    before = step(n_loops=3)
    assert all(momentum.any() for _, momentum in before.values())
    moe.expert_bias[1] = -100
    step(n_loops=2)
    after = step(n_loops=2)
    for (p, i), (weight, momentum) in before.items():
        is_idle = i == idle[p]
        assert torch.equal(weight, after[p, i][0]) == is_idle, (p.shape, i)
        assert torch.equal(momentum, after[p, i][1]) == is_idle, (p.shape, i)


def orthogonalize_the_only_matrix(world):
    rows = torch.arange(64.0).view(4, 16).bfloat16() + 64 * world.shard
    half = distributed.ShardedParameter("only", SimpleNamespace(shape=(8, 16)), rows, [0, 4, 8])
    assignment = muon_ranks.MatrixAssignment(world, [half])
    (update,) = assignment.map(lambda wholes: [2 * whole for whole in wholes], [rows[None]])
    assert torch.equal(update, rows[None] * 2)


def test_shard_without_a_matrix_to_orthogonalize_gets_its_bf16_result(processes):
    assert run_ranks(processes, orthogonalize_the_only_matrix, ranks=2, shards=2) == [0, 0]


# --------------------------------------------------------------------------------------------------
# Engram tables


def small_table(rows: int = 5) -> tuple[EngramTable, RowwiseAdagrad]:
    """Return a table [rows, 3] of zeros and its optimizer. `rows` is a prime; bytes are the
    addresses."""
    table = EngramTable(("1",), 1, rows, 3)
    torch.nn.init.zeros_(table.weight)
    table.addresses = lambda past: past.T
    return table, RowwiseAdagrad([table], lr=0.5)


@pytest.mark.parametrize("rows", (5, 101), ids=("summed by row", "listed"))
@pytest.mark.parametrize("parts", (1, 2, 4))
def test_adagrad_steps_by_the_summed_gradient_of_all_lookups(rows, parts):
    """Row 2, looked up three times in step 1, has the gradient 3, yet moves as far as the other
    rows. In step 2 its squares add up to 9 + 1 = 10."""
    table, optimizer = small_table(rows)
    expected = torch.zeros(rows, 3)
    expected[[0, 2, 4]] = -0.5  # lr * g / sqrt(g^2)
    for part in torch.tensor([[2, 4, 2, 2, 0]]).chunk(parts, dim=1):
        table(part).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(table.weight.detach(), expected)
    table(torch.tensor([[2]])).sum().backward()
    optimizer.step()
    expected[2] -= 0.5 / 10**0.5
    torch.testing.assert_close(table.weight.detach(), expected)
    squares = torch.zeros(rows)
    squares[[0, 2, 4]] = torch.tensor([1.0, 10.0, 1.0])
    torch.testing.assert_close(optimizer.state[table.weight]["sum"], squares)
    optimizer.reset()
    assert not table.weight.any() and not optimizer.state[table.weight]


def test_gathered_lookups_are_bounded_over_micro_steps():
    table, _ = small_table(101)
    for _ in range(50):
        table(torch.arange(40)[None]).sum().backward()
        assert len(lookups_of(table)[0]) <= 1.5 * 101 + 40


def test_gathered_lookups_are_dropped_after_every_step_and_never_saved():
    model = awake(small_config())
    tables = tables_of(model)
    keys = model.state_dict().keys()
    settings = StepSettings(n_loops=2)
    optimizers = Optimizers(model, "adamw")

    def gather():
        accumulate(model, random_batch(2), settings)
        assert all(has_lookups(table) and table.weight.grad is None for table in tables)
        assert model.state_dict().keys() == keys
        assert not optimizers.by_name["engram"].state

    for forget in (model.zero_grad, optimizers.zero_grad):
        gather()
        forget()
        assert not any(map(has_lookups, tables))
    model.prelude[0].ffn.down_proj.weight.data[0, 0] = math.nan
    assert train_step(model, optimizers, random_batch(2), settings)[0]["skipped"]
    assert not any(has_lookups(table) or table.weight.isnan().any() for table in tables)
    gather()
    model.to("meta").to_empty(device="cpu").init_weights()
    assert not any(map(has_lookups, tables))


def warnings_of_a_step(optimizer, model: torch.nn.Module, zero_grad) -> list[str]:
    """Run a step of a user's loop, with two passes; return its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            ids = text(2, 32, seed)
            model(ids, ids).loss.backward()
        optimizer.step()
        zero_grad()
    return [str(warning.message) for warning in caught]


def test_tables_without_their_optimizer_warn_once_per_process(monkeypatch):
    monkeypatch.setattr(EngramTable, "warned", False)
    model = awake(small_config())
    optimizers = Optimizers(model, "adamw")
    assert not warnings_of_a_step(optimizers, model, optimizers.zero_grad)
    models = [awake(small_config()), awake(small_config())]
    before = models[0].engram_input.table.weight.detach().clone()
    first, second = (
        warnings_of_a_step(torch.optim.AdamW(model.parameters()), model, model.zero_grad)
        for model in models
    )
    (line,) = first
    assert "RowwiseAdagrad" in line and "docs/guide/your-own-loop.md" in line
    assert not second
    assert torch.equal(models[0].engram_input.table.weight, before)


def test_tables_learn_if_all_other_parameters_are_frozen():
    model = awake(small_config())
    tables = [table.weight for table in tables_of(model)]
    model.requires_grad_(False)
    for weight in tables:
        weight.requires_grad_(True)
    before = [weight.clone() for weight in tables]
    metrics, _ = train_step(model, Optimizers(model), random_batch(2), StepSettings(n_loops=2))
    assert metrics["grad_norm"] == 0
    assert not any(map(torch.equal, before, tables))


# --------------------------------------------------------------------------------------------------
# All parameters of a model


def matrices_of(model) -> set[str]:
    return {name for name, kind in kinds_of(model).items() if kind.optimizer == "muon"}


def test_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="optimizer: 'sgd' is not one of adamw, adamw8bit, muon"):
        Optimizers(awake(small_config()), "sgd")


def test_8_bit_adamw_has_the_parameters_and_settings_of_adamw():
    """Settings that 8-bit AdamW lacks have torch's defaults in AdamW."""
    model = awake(small_config())
    alone = torch.optim.AdamW(model.parameters(), fused=True).param_groups[0]
    numbers = {
        name: argument.default
        for name, argument in inspect.signature(Optimizers).parameters.items()
        if isinstance(argument.default, float)
    }
    assert {"lr", "weight_decay", "beta1", "beta2"} <= numbers.keys()
    for name, default in numbers.items():
        setting = {name: default / 2}
        plain = Optimizers(model, "adamw", **setting).by_name["adamw"]
        in_8_bit = Optimizers(model, "adamw8bit", **setting).by_name["adamw8bit"]
        for group, other in zip(plain.param_groups, in_8_bit.param_groups, strict=True):
            for key, value in group.items():
                assert other.get(key, alone.get(key)) == value, (name, key)


def test_muon_takes_only_linears_among_added_modules():
    model = awake(small_config())
    before = matrices_of(model)
    block = model.prelude[0]
    block.more = torch.nn.Linear(32, 32)
    block.conv = torch.nn.Conv1d(32, 32, 4, groups=32)
    block.table = torch.nn.Embedding(9, 32)
    block.pairs = torch.nn.Bilinear(4, 4, 4)
    block.w_gate = torch.nn.Parameter(torch.ones(4, 32, 8))  # named like a stack of experts
    block.w_up = torch.nn.Parameter(torch.ones(8, 32))
    model.core.layers[0].moe.w_extra = torch.nn.Parameter(torch.ones(4, 32, 8))
    assert matrices_of(model) == before | {"prelude.0.more.weight"}
    by_adamw = set()
    for group in Optimizers(model).by_name["adamw"].param_groups:
        by_adamw.update(group["params"])
    assert {block.conv.weight, block.w_gate, block.pairs.weight} <= by_adamw
