"""torch.compile: one graph per kind of layer, few graphs for all sizes, the choices of --compile.
Eager steps on a GPU, or on a CPU that stands in for it.

On a CPU, layers take the form that they have on a GPU; graphs are captured, but not translated to
kernels."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import train
from conftest import (
    assert_same,
    awake,
    documents,
    gradients,
    has_fp8,
    metrics,
    resolved,
    run_flags,
    small_config,
    text,
    weights_of,
    world_of,
)
from data import Batch
from spider import machine
from spider.config import PRESETS
from spider.errors import UsageError
from spider.machine import resolve_compile
from spider.model.packing import Packing
from spider.training.fp8 import convert_to_fp8
from spider.training.optim import Optimizers
from spider_model import Spider
from stand_in_gpu import GPU, stand_in_gpu, varlen_attn
from tile_moe import grouped_product
from train import StepSettings, train_step

CPU = torch.device("cpu")


def unique_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def forget_graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let attention use the kernel for packed documents."""
    build = Packing.build

    def without_buckets(*args):
        packing = build(*args)
        packing.buckets = None
        packing.padded_index = None
        packing.max_seqlen_as_size = torch.empty(packing.max_seqlen, 0)
        return packing

    monkeypatch.setattr(Packing, "build", without_buckets)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    forget_graphs()


def model_as_on_a_gpu(recompute: bool = True, dtype=torch.bfloat16, **changes) -> Spider:
    """Make a model that masks halted segments and multiplies in bf16."""
    model = awake(small_config(**changes))
    model.compute_dtype = dtype
    model.core.drop_halted = False
    model.recompute = "core" if recompute else "nothing"
    return model


def check_near(ours: dict, others: dict, exact: dict, times: float, rtol: float):
    """Check that each error is at most `times` the error of `others` plus `rtol` of the norm."""
    assert ours.keys() == exact.keys()
    for name, tensor in exact.items():
        if tensor is not None:
            within = times * (others[name] - tensor).norm() + rtol * tensor.norm() + 1e-4
            assert (ours[name] - tensor).norm() <= within, name


class Graphs:
    """A backend that records the operations of its forward and backward graphs and runs them
    unchanged."""

    def __init__(self):
        self.forward = []
        self.backward = []
        self.backend = aot_autograd(
            fw_compiler=self.keep(self.forward),
            bw_compiler=self.keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def keep(self, graphs):
        def compiler(module, inputs):
            graphs.append([str(node.target) for node in module.graph.nodes])
            return make_boxed_func(module.forward)

        return compiler


@pytest.mark.slow
def test_compiled_layers_are_one_graph_each_with_eager_gradients(as_on_a_gpu):
    """The backward graph contains the recomputation, but never routing."""
    ids = torch.cat([documents(30, 20, 14), text(1, 64)])
    products = {}  # matrix products in backward, with and without recomputing the core
    for recompute in (True, False):
        graphs = Graphs()

        def loss_and_gradients(dtype, compiled, recompute=recompute, graphs=graphs):
            model = model_as_on_a_gpu(recompute, dtype, boundaries="words")
            if compiled:
                model.compile_layers(backend=graphs.backend, fullgraph=True)
            loss = model(ids, ids, 2, 5).loss
            loss.backward()
            return loss.item(), gradients(model)

        exact_loss, exact = loss_and_gradients(torch.float32, compiled=False)
        _, eager = loss_and_gradients(torch.bfloat16, compiled=False)
        loss, ours = loss_and_gradients(torch.bfloat16, compiled=True)
        assert loss == pytest.approx(exact_loss, rel=1e-3)
        check_near(ours, eager, exact, times=2, rtol=0.02)
        # 1 byte layer; 4 core layers, with and without memory, in the first and in later loops;
        # 2 injections, in the first and in later loops; 1 for what the memory computes once.
        assert len(graphs.forward) == len(graphs.backward) == 8
        backward = [target for graph in graphs.backward for target in graph]
        assert any("aten.sort" in target for graph in graphs.forward for target in graph)
        assert not any("aten.sort" in target for target in backward)
        products[recompute] = sum(target.startswith("aten.mm") for target in backward)
    assert products[True] > products[False]


def test_compiled_fp8_layers_are_one_graph_each_with_eager_gradients(as_on_a_gpu):
    ids = text(2, 32)
    results = []
    for compiled in (False, True):
        model = model_as_on_a_gpu(boundaries="words", n_loops=1)
        convert_to_fp8(model, CPU, experts=False, step_bytes=ids.numel())
        if compiled:
            model.compile_layers(backend="eager", fullgraph=True)
        with model.cast_weights_once():
            model(ids, ids, 1, 5).loss.backward()
        results.append(gradients(model))
    assert unique_graphs() == 5
    eager, compiled = results
    for name, grad in eager.items():
        if grad is not None:
            # e5m2 has two mantissa bits, so a different order of sums may change results by a fifth
            assert (compiled[name] - grad).norm() <= 0.3 * grad.norm(), name


def test_later_steps_of_any_size_and_settings_add_no_graph(as_on_a_gpu):
    """Vary the numbers of segments, documents and loops, dropout, halting and rates."""
    model = model_as_on_a_gpu()
    model.compile_layers(backend="eager", fullgraph=True)
    optimizers = Optimizers(model, "adamw")
    lengths = []  # bytes per segment
    graphs = []
    for step in range(6):
        with torch.no_grad():
            model.boundary_predictor[2].bias.fill_((-2.0, 0.5, -1.0)[step % 3])
        ids = text(4, 64, seed=step)
        if step % 2:
            short = step % 4  # documents of 8 bytes
            sizes = (8,) * short + (64 - 8 * short,)
            ids = torch.cat([documents(*sizes, seed=step + i) for i in range(4)])
        optimizers.set_lr(0.001, 1 - step / 10)
        now = StepSettings(2 + step % 3, dropout=step / 10, halting_warmup=(1 + step) / 6)
        numbers, _ = train_step(model, optimizers, [Batch.of(ids, ids, step)], now)
        lengths.append(numbers["bytes_per_segment"])
        graphs.append(unique_graphs())
    assert max(lengths) > 1.5 * min(lengths)
    assert graphs == [8] * 6
    assert not torch._dynamo.utils.counters["graph_break"]


def test_only_passes_with_gradients_run_compiled():
    def never(module, inputs):
        raise AssertionError("compiled")

    model = awake(small_config())
    model.compile_layers(backend=never)
    with torch.no_grad():
        model(text(2, 32), noise_seed=0)
        model.eval()(text(2, 32))
        model.step(text(1, 4), model.decoding_state())
    with pytest.raises(Exception, match="compiled"):
        model.train()(text(2, 32), noise_seed=0)
    model.uncompile_layers()
    model(text(2, 32), noise_seed=0)


def test_core_with_a_graph_break_stays_uncompiled_with_a_reason():
    model = Spider(small_config())
    assert "only in bf16" in model.compile_layers(backend="eager")
    model.compute_dtype = torch.bfloat16
    model.set_backend("tile")
    assert "--moe_backend grouped" in model.compile_layers(backend="eager")
    assert model.core.layers[0].compiled is None
    assert model.prelude[0].compiled is not None
    model.set_backend("grouped")
    assert model.compile_layers(backend="eager") is None
    assert model.core.layers[0].compiled is not None


def test_fp32_experts_run_uncompiled_inside_a_compiled_function():
    forget_graphs()
    tokens = torch.linspace(-1, 1, 8 * 16).view(8, 16)
    weights = torch.linspace(-1, 1, 2 * 16 * 16).view(2, 16, 16)
    operands = (tokens, weights, torch.tensor([5, 8], dtype=torch.int32))
    compiled = torch.compile(grouped_product, backend="aot_eager")
    assert torch.equal(compiled(*operands), grouped_product(*operands))
    assert torch._dynamo.utils.counters["graph_break"]


@pytest.fixture
def gpu(monkeypatch):
    """Fake a GPU on which torch.compile works, or fails because of `obstacle`."""

    def pretend(obstacle=None):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
        monkeypatch.setattr(machine, "obstacle_to_compile", lambda device: obstacle)
        return torch.device("cuda")

    return pretend


def test_missing_compiler_is_an_error_under_on_and_logged_under_auto(gpu, new_log):
    machine.start_log()
    device = gpu(obstacle="there is no Triton")
    assert not resolve_compile("auto", device)
    assert "not compiled: there is no Triton" in new_log()
    with pytest.raises(UsageError, match="--compile: there is no Triton; or use --compile off"):
        resolve_compile("on", device)
    assert resolve_compile("auto", gpu())
    assert not resolve_compile("auto", CPU)
    assert resolve_compile("on", CPU)


def test_compiler_check_finds_errors_and_wrong_values(
    monkeypatch,
):
    def broken(*message):
        def compile(function):
            raise RuntimeError(*message)

        return compile

    for compile, shown in (
        (broken("no compiler\nand much more"), "(no compiler)"),
        (broken(), "(RuntimeError)"),
        (lambda function: lambda x: 2 * function(x), "fails here"),
    ):
        monkeypatch.setattr("torch.compile", compile)
        obstacle = machine.obstacle_to_compile(CPU)
        assert shown in obstacle
        assert "\n" not in obstacle
    monkeypatch.setattr("torch.compile", lambda function: function)
    assert machine.obstacle_to_compile(CPU) is None


@pytest.mark.parametrize("compile, status", (("on", 2), ("auto", 0)))
def test_compile_failure_ends_the_run_under_on_but_not_under_auto(
    compile, status, tmp_path, shards, monkeypatch, capsys
):
    def broken(function, **settings):
        def fail(*args):
            raise RuntimeError

        return fail if function.__name__ == "in_one_graph" else function

    monkeypatch.setattr("torch.compile", broken)
    monkeypatch.setattr(machine, "resolve_compile", lambda name, device: True)
    argv = run_flags(shards, tmp_path / "run", "--compile", compile, steps=2)
    assert train.command_line(argv) == status
    shown = capsys.readouterr().err
    assert "torch.compile fails here (RuntimeError)" in shown
    assert "Traceback" not in shown
    if status == 0:
        assert len(metrics(tmp_path / "run")) == 2


# --------------------------------------------------------------------------------------------------
# Steps on a GPU

SMALL_1B = PRESETS["1b"] | dict(
    # multiples of 16, for FP8 products
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_experts_per_tok=4,
    byte_window=24,
    engram_byte_rows=230,  # few enough that lookups of the first micro-step are summed
)
DEVICES = pytest.mark.parametrize(
    "device", (CPU, pytest.param(GPU, marks=pytest.mark.gpu)), ids=("stand-in", "gpu")
)


def model_on(device: torch.device, **changes) -> Spider:
    """Make a model whose segments and experts do not depend on rounding."""
    model = awake(small_config(**changes)).to(device)
    if model.config.boundaries == "learned":
        # Only bytes decide the boundaries.
        model.boundary_predictor.steps.zero_()
    for layer in model.core.layers:
        # Only the bias chooses experts.
        layer.moe.expert_bias += torch.arange(0, 40, 10, device=device)
    return model


def batches_on(device: torch.device, step: int = 0) -> list[Batch]:
    """Make the batches of a step's two micro-steps."""
    ids = torch.cat([documents(30, 20, 14, seed=step), text(2, 64, seed=step)])
    return [Batch.of(part, part, seed).to(device) for seed, part in enumerate(ids.split(2))]


def gradients_on(device: torch.device, precision: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients by name of an eager step of a small `1b`."""
    model = model_on(device, **SMALL_1B)
    model.compute_dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    batches = batches_on(device)
    if precision == "fp8":
        step_bytes = sum(batch.n_bytes for batch in batches)
        convert_to_fp8(model, device, experts=False, step_bytes=step_bytes)
    sums = train.accumulate(model, batches, StepSettings(2, dropout=0.1))
    tensors = {name: grad.cpu() for name, grad in gradients(model).items() if grad is not None}
    return float(sums["total_loss"]), tensors


@pytest.fixture(scope="module")
def gradients_on_a_cpu():
    return {precision: gradients_on(CPU, precision) for precision in ("fp32", "bf16", "fp8")}


@pytest.mark.parametrize("precision", ("bf16", "fp8"))
@DEVICES
def test_gradients_of_a_step_on_a_gpu_are_as_near_fp32_as_on_a_cpu(
    device, precision, gradients_on_a_cpu
):
    if device == GPU and precision == "fp8" and not has_fp8():
        pytest.skip("this GPU has no FP8")
    with stand_in_gpu() if device == CPU else nullcontext():
        loss, tensors = gradients_on(device, precision)
    _, exact = gradients_on_a_cpu["fp32"]
    loss_on_cpu, on_cpu = gradients_on_a_cpu[precision]
    assert loss == pytest.approx(loss_on_cpu, rel=1e-3)
    check_near(tensors, on_cpu, exact, times=3, rtol=0.05)


def updates_on(device: torch.device, **changes) -> dict[str, torch.Tensor]:
    """Run two steps of Muon in fp32 with clipped gradients, then a step with infinite gradients,
    which must change nothing; return the changes of weights and buffers by name."""
    model = model_on(device, **changes)
    optimizers = Optimizers(model)
    before = weights_of(model)
    for step in range(2):
        optimizers.set_lr(0.01, 1 - step / 4)
        now = StepSettings(2, dropout=0.1, halting_warmup=0.5)
        train_step(model, optimizers, batches_on(device, step), now, grad_clip=0.5)
    after = weights_of(model)
    model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    train_step(model, optimizers, batches_on(device), StepSettings(2))
    assert_same(weights_of(model), after)
    return {name: (after[name] - before[name]).cpu() for name in before}


@pytest.mark.parametrize(
    "changes", (SMALL_1B, SMALL_1B | dict(n_experts_per_tok=1), {}), ids=("1b", "top-1", "original")
)
@DEVICES
def test_a_step_on_a_gpu_changes_weights_and_buffers_as_on_a_cpu(device, changes, monkeypatch):
    monkeypatch.setattr("spider.training.optim.has_bf16", lambda device: False)
    expected = updates_on(CPU, **changes)
    with stand_in_gpu() if device == CPU else nullcontext():
        changed = updates_on(device, **changes)
    within = 3e-4 if device == CPU else 0.01  # the order of sums differs
    for name, change in expected.items():
        difference = (changed[name] - change).double()
        assert difference.norm() <= within * change.double().norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ("bf16", "fp8"))
def test_compiled_training_on_a_gpu_follows_eager_training(precision):
    """Ten steps of varying sizes: losses agree, and only the two warm-up passes add graphs."""
    world = world_of("cuda")
    losses = {"off": [], "on": []}
    if precision == "fp8" and not has_fp8():
        pytest.skip("this GPU has no FP8")
    config = small_config(**SMALL_1B)
    for compiled in ("off", "on"):
        forget_graphs()
        flags = f"--compile off --precision {precision} --seq_len 256 --micro_batch 8"
        plan = resolved(*flags.split())
        plan = replace(plan, config=config, flags=replace(plan.flags, compile=compiled))
        with torch.device("meta"):
            model = Spider(config)
        train.build_model(model, plan, world)
        optimizers = Optimizers(model)
        optimizers.set_lr(0.003, 1.0)
        ids = text(8, 256)
        train.warm_up(model, plan, Batch.of(ids, ids, 0).to(world.device))
        graphs = unique_graphs()
        for step in range(10):
            ids = text(8, 256, seed=step % 3)
            if step % 2:
                ids = torch.cat([documents(100, 156 - step, step, seed=step + i) for i in range(8)])
            batch = Batch.of(ids, ids, step).to(world.device)
            metrics, _ = train_step(model, optimizers, [batch], StepSettings(2))
            losses[compiled].append(metrics["loss"])
        assert unique_graphs() == graphs
        assert (graphs > 0) == (compiled == "on")
    assert losses["on"] == pytest.approx(losses["off"], rel=0.03)
