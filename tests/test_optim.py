"""The optimizers: Muon and its stacks, the rows of Engram tables, and which parameters belong to
which."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import awake, small_config, text
from data import Batch
from jobs import run_ranks
from spider.distributed import ShardedParameter
from spider.memory import EngramTable
from spider.muon_ranks import MatrixAssignment
from spider.optim import (
    Muon,
    Optimizers,
    RowwiseAdagrad,
    kinds_of,
    orthogonalize,
)
from spider.state import load_optimizer
from train import step_alone

# --------------------------------------------------------------------------------------------------
# Muon


def test_orthogonalize_moves_singular_values_towards_one_for_every_matrix_of_a_stack():
    sizes = torch.tensor([1, 1e-3, 1e3])[:, None, None]
    stack = torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(0)) * sizes
    for matrices in (stack, stack.mT):
        out = orthogonalize(matrices).float()
        values = torch.linalg.svdvals(out)
        assert values.min() > 0.4 and values.max() < 1.4
        assert (
            torch.nn.functional.cosine_similarity(out.flatten(1), matrices.flatten(1)) > 0.8
        ).all()


def test_muon_treats_a_stack_as_its_matrices_and_follows_its_definition():
    generator = torch.Generator().manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(2, 24, 16, generator=generator))
    singles = [torch.nn.Parameter(m.clone()) for m in stack.detach()]
    settings = dict(lr=0.1, momentum=0.95, weight_decay=0.1)
    optimizers = [Muon([stack], **settings), Muon(singles, **settings)]
    exact, buffer = stack.detach().double(), torch.zeros(2, 24, 16, dtype=torch.float64)
    for _ in range(3):
        grad = torch.randn(2, 24, 16, generator=generator)
        buffer = 0.95 * buffer + 0.05 * grad
        x = (0.05 * grad + 0.95 * buffer).mT
        x = x / torch.linalg.matrix_norm(x, keepdim=True)
        for _ in range(4):
            gram = x @ x.mT
            x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
        exact = exact * (1 - 0.1 * 0.1) - 0.1 * 0.2 * 24**0.5 * x.mT
        stack.grad = grad.clone()
        for single, part in zip(singles, grad, strict=True):
            single.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stack.detach(), torch.stack([p.detach() for p in singles]))
    torch.testing.assert_close(stack.detach().double(), exact, rtol=0, atol=2e-3)


@pytest.mark.parametrize("shape", ((24, 32), (3, 24, 32)))
def test_at_a_rate_of_zero_muon_keeps_weights_to_the_bit_and_updates_its_momentum(shape):
    p = torch.nn.Parameter(torch.randn(shape))
    before, p.grad = p.detach().clone(), torch.randn(shape)
    optimizer = Muon([p], lr=0.0, momentum=0.95, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(p.detach(), before)
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], 0.05 * p.grad)


@pytest.mark.parametrize(
    "backend,dtype", (("loop", "float32"), ("grouped", "float32"), ("grouped", "bfloat16"))
)
def test_muon_moves_neither_an_idle_expert_nor_the_adapter_of_an_unused_loop(backend, dtype):
    """Nor their momentum; the rest of the stack moves, and so do they when they are needed."""
    model = awake(small_config(n_loops=3))
    model.set_backend(backend)
    model.compute_dtype = getattr(torch, dtype)
    optimizers = Optimizers(model, weight_decay=0.5)
    optimizers.set_lr(0.01, 1.0)
    batch = [Batch.of(text(4, 32, seed=1), text(4, 32, seed=2), 0)]
    moe, core = model.core.layers[0].moe, model.core
    idle = {
        "w_gate": (moe.w_gate, 1),
        "w_up": (moe.w_up, 1),
        "w_down": (moe.w_down, 1),
        "lora_down": (core.lora_down, 2),
        "lora_up": (core.lora_up, 2),
    }

    def slices() -> dict:
        """(weight, momentum) of every matrix of the stacks."""
        momentum = optimizers.by_name["muon"].state
        return {
            (name, i): (p[i].detach().clone(), momentum[p]["momentum_buffer"][i].clone())
            for name, (p, _) in idle.items()
            for i in range(len(p))
        }

    step_alone(model, optimizers, batch, 3)
    before = slices()
    assert all(momentum.any() for _, momentum in before.values())
    moe.expert_bias[1] = -100
    for _ in range(2):
        step_alone(model, optimizers, batch, 2)
    after = slices()
    for (name, i), parts in before.items():
        for part, now in zip(parts, after[name, i], strict=True):
            assert torch.equal(part, now) == (i == idle[name][1]), (name, i)
    moe.expert_bias[1] = 0
    step_alone(model, optimizers, batch, 3)
    assert not any(torch.equal(after[key][0], weight) for key, (weight, _) in slices().items())


def orthogonalize_the_only_matrix(world):
    rows = torch.arange(64.0).view(4, 16).bfloat16() + 64 * world.shard
    half = ShardedParameter("only", SimpleNamespace(shape=(8, 16)), rows, [0, 4, 8])
    (update,) = MatrixAssignment(world, [half])([rows], lambda whole: whole * 2)
    assert torch.equal(update, rows * 2)


def test_two_shards_exchange_their_only_matrix_in_bf16(processes):
    """One of them returns no matrix, and must receive its rows as the other sends them."""
    assert run_ranks(processes, orthogonalize_the_only_matrix, ranks=2, shards=2) == [0, 0]


# --------------------------------------------------------------------------------------------------
# Engram tables


def small_table(rows: int = 5) -> tuple[EngramTable, RowwiseAdagrad]:
    """A table [rows, 3] of zeros whose bytes are its addresses, for a prime of rows, and its
    optimizer."""
    table = EngramTable((1,), 1, rows, 3)
    torch.nn.init.zeros_(table.weight)
    table.addresses = lambda shifted: shifted.T
    return table, RowwiseAdagrad([table], lr=0.5)


def test_rowwise_adagrad_touches_looked_up_rows_only_and_scales_by_their_past():
    table, optimizer = small_table()
    for expected in (0.5, 0.5 / 2**0.5):
        before = table.weight.detach().clone()
        table(torch.tensor([[2]])).sum().mul(7).backward()
        optimizer.step()
        optimizer.zero_grad()
        step = before - table.weight.detach()
        torch.testing.assert_close(step[2], torch.full((3,), expected))
        assert not step[[0, 1, 3, 4]].any()
    optimizer.reset()
    assert not table.weight.any() and not optimizer.state[table.weight]


@pytest.mark.parametrize("rows", (5, 101), ids=("summed by row", "listed"))
@pytest.mark.parametrize("parts", (1, 2, 4))
def test_a_rows_past_is_the_sum_of_its_lookups_squares_not_the_square_of_their_sum(rows, parts):
    """Two lookups of squares 2 make 4; merged before, as torch adds sparse gradients on a CPU, they
    would make 8."""
    table, optimizer = small_table(rows)
    for part in torch.tensor([[2, 4, 2, 0]]).chunk(parts, dim=1):
        (table(part) * 2**0.5).sum().backward()
    optimizer.step()
    total = torch.zeros(rows)
    total[[0, 2, 4]] = torch.tensor([2.0, 4.0, 2.0])
    torch.testing.assert_close(optimizer.state[table.weight]["sum"], total)
    expected = torch.zeros(rows, 3)
    # lr * sum(g) / sqrt(sum)
    expected[[0, 2, 4]] = torch.tensor([-0.5, -0.5 * 2**0.5, -0.5])[:, None]
    torch.testing.assert_close(table.weight.detach(), expected)


def test_tables_gather_no_more_than_their_rows_whatever_the_number_of_micro_steps():
    table, _ = small_table(101)
    for _ in range(50):
        table(torch.arange(40)[None]).sum().backward()
        assert sum(len(row) for row, _, _ in table.gathered()) <= 1.5 * 101 + 40


def test_gathered_rows_are_forgotten_however_a_step_ends():
    """A skipped step, the warm-up's zero_grad and a move through the meta device; a checkpoint
    never holds it."""
    model = awake(small_config())
    tables = [module for module in model.modules() if isinstance(module, EngramTable)]
    keys, optimizers = model.state_dict().keys(), Optimizers(model, "adamw")
    batch = [Batch.of(text(2, 32, seed=1), text(2, 32, seed=2), 0)]

    def gather():
        train.accumulate(model, batch, 2)
        assert all(table.gathered() and table.weight.grad is None for table in tables)
        assert model.state_dict().keys() == keys and not optimizers.by_name["engram"].state

    for forget in (model.zero_grad, optimizers.zero_grad):
        gather()
        forget()
        assert not any(table.gathered() for table in tables)
    model.prelude[0].ffn.down_proj.weight.data[0, 0] = math.nan
    assert step_alone(model, optimizers, batch, 2)["skipped"]
    assert not any(table.gathered() or table.weight.isnan().any() for table in tables)
    gather()
    model.to("meta").to_empty(device="cpu").init_weights()
    assert not any(table.gathered() for table in tables)


def step_of(optimizer, model: torch.nn.Module, zero_grad) -> list[str]:
    """Run a step of a user's own loop, with two passes; return its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            ids = text(2, 32, seed)
            model(ids, ids).loss.backward()
        optimizer.step()
        zero_grad()
    return [str(warning.message) for warning in caught]


def test_tables_that_no_optimizer_of_ours_steps_are_a_warning_once_a_process(monkeypatch):
    monkeypatch.setattr(EngramTable, "warned", False)
    for model in (awake(small_config()), awake(small_config())):
        optimizers = Optimizers(model, "adamw")
        assert not step_of(optimizers, model, optimizers.zero_grad)
    models = awake(small_config()), awake(small_config())
    before = models[0].engram_input.table.weight.detach().clone()
    said = [
        step_of(torch.optim.AdamW(model.parameters()), model, model.zero_grad) for model in models
    ]
    assert [len(lines) for lines in said] == [1, 0]
    assert "RowwiseAdagrad" in said[0][0] and "docs/guide/your-own-loop.md" in said[0][0]
    assert torch.equal(models[0].engram_input.table.weight, before)


# --------------------------------------------------------------------------------------------------
# All of a model


def test_optimizers_take_settings_by_name_and_no_name_of_another_kind():
    model = awake(small_config())
    optimizers = Optimizers(model, lr=0.01, momentum=0.5, beta1=0.8, engram_lr=0.1)
    groups = {name: part.param_groups[0] for name, part in optimizers.by_name.items()}
    assert groups["muon"]["lr"] == groups["adamw"]["lr"] == 0.01 and groups["engram"]["lr"] == 0.1
    assert groups["muon"]["momentum"] == 0.5 and groups["adamw"]["betas"] == (0.8, 0.95)
    with pytest.raises(ValueError, match="optimizer: 'sgd' is not one of adamw, adamw8bit, muon"):
        Optimizers(model, "sgd")


def matrices_of(model) -> set[str]:
    return {name for name, kind in kinds_of(model).items() if kind.optimizer == "muon"}


@pytest.mark.parametrize("name", ("adamw", "adamw8bit", "muon"))
def test_every_parameter_is_trained_once_tables_at_a_rate_of_their_own_without_decay(name):
    model = awake(small_config())
    optimizers = Optimizers(model, name)
    owned = [
        p
        for part in optimizers.by_name.values()
        for group in part.param_groups
        for p in group["params"]
    ]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    optimizers.set_lr(0.01, 1.0)
    tables = [id(m.weight) for m in model.modules() if isinstance(m, EngramTable)]
    for part in optimizers.by_name.values():
        for group in part.param_groups:
            for p in group["params"]:
                assert group["lr"] == (0.25 if id(p) in tables else 0.01)
                assert not (group.get("weight_decay", 0) and (p.ndim < 2 or id(p) in tables))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    ids = text(4, 64)
    model(ids, ids, noise_seed=0).loss.backward()
    optimizers.step()
    for key, p in model.named_parameters():
        assert not torch.equal(before[key], p), key


def test_experts_and_hidden_matrices_go_to_muon_embeddings_head_and_router_do_not():
    model = awake(small_config())
    by_muon = matrices_of(model)
    assert {
        "core.layers.0.moe.w_gate",
        "core.lora_up",
        "prelude.0.attention.q_a_proj.weight",
        "core.layers.1.engram.key_proj.weight",
        "engram_output.proj.weight",
    } <= by_muon
    assert (
        not {
            "embed_tokens",
            "lm_head.weight",
            "core.layers.0.moe.router.weight",
            "core.loop_embedding",
            "engram_output.gate.weight",
            "engram_input.table.weight",
            "core.halt_predictor.weight",
        }
        & by_muon
    )


def test_of_modules_that_a_researcher_adds_linears_alone_go_to_muon_whatever_the_names():
    model = awake(small_config())
    before, block = matrices_of(model), model.prelude[0]
    block.conv, block.table = torch.nn.Conv1d(32, 32, 4, groups=32), torch.nn.Embedding(9, 32)
    block.w_gate, block.w_up = (
        torch.nn.Parameter(torch.ones(4, 32, 8)),
        torch.nn.Parameter(torch.ones(8, 32)),
    )
    block.more, block.pairs = torch.nn.Linear(32, 32), torch.nn.Bilinear(4, 4, 4)
    model.core.layers[0].moe.w_extra = torch.nn.Parameter(torch.ones(4, 32, 8))
    assert matrices_of(model) == before | {"prelude.0.more.weight"}
    optimizers = Optimizers(model)
    by_adamw = {
        id(p) for group in optimizers.by_name["adamw"].param_groups for p in group["params"]
    }
    assert {id(block.conv.weight), id(block.w_gate), id(block.pairs.weight)} <= by_adamw


def test_a_state_of_a_parameter_without_dimensions_can_be_loaded():
    scale = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([scale])
    scale.grad = torch.ones(())
    optimizer.step()
    other = torch.optim.AdamW([scale])
    load_optimizer("adamw", other, optimizer.state_dict())
    assert other.state[scale]["exp_avg"] == optimizer.state[scale]["exp_avg"] != 0


def test_tables_learn_alone_where_all_else_is_frozen():
    model = awake(small_config())
    tables = [module.weight for module in model.modules() if isinstance(module, EngramTable)]
    model.requires_grad_(False)
    for weight in tables:
        weight.requires_grad_(True)
    before = [weight.clone() for weight in tables]
    metrics = step_alone(
        model, Optimizers(model), [Batch.of(text(2, 32, seed=1), text(2, 32, seed=2), 0)], 2
    )
    assert metrics["grad_norm"] == 0 and not any(map(torch.equal, before, tables))
