"""torch.compile: a layer is one graph, a few graphs serve every size, and who chooses it. On a CPU layers take the form
that they have on a GPU, and graphs are made but not translated; spider/dev/compiled.py shows what Inductor makes of
them."""

from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import train
from conftest import awake, documents, gradients, metrics, run_flags, settled, small_config, text
from spider.errors import UsageError
from spider.model.packing import Packing
from spider.training import machine
from spider.training.batches import Batch
from spider.training.machine import resolve_compile, resolve_precision
from spider.training.optimizers import Optimizers
from spider.training.plan import BatchShape, OptimizerSettings
from spider_model import Spider
from train import parse_args, step_alone


def plain_varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size):
    """Attention inside documents with all of its scores, in place of the kernel that only a GPU has."""
    row = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(cu_seq_q[1:], row, right=True)
    hidden = (document[:, None] != document) | (row[:, None] < row)
    score = torch.einsum("qhd,khd->hqk", q, k).float() * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype), v)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Attention by a kernel for documents, halted segments masked, products in bf16."""
    build = Packing.build

    def without_buckets(*args):
        packing = build(*args)
        packing.buckets = packing.padded_row = None
        return packing
    monkeypatch.setattr(Packing, "build", without_buckets)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen_attn)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def model_as_on_a_gpu(recompute: bool = True, **changes) -> Spider:
    model = awake(small_config(**changes))
    model.compute_dtype, model.core.halted_leave = torch.bfloat16, False
    model.recompute = "core" if recompute else "nothing"
    return model


class Graphs:
    """A backend that keeps what it is handed, forward and backward, and runs it as it is."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(fw_compiler=self.keep(self.forward), bw_compiler=self.keep(self.backward),
                                    partition_fn=min_cut_rematerialization_partition)

    def keep(self, graphs):
        def compiler(module, inputs):
            graphs.append([str(node.target) for node in module.graph.nodes])
            return make_boxed_func(module.forward)
        return compiler


@pytest.mark.slow
@pytest.mark.parametrize("recompute", (True, False))
def test_every_layer_is_one_graph_and_learns_what_it_learns_without(as_on_a_gpu, recompute):
    ids, graphs, results = torch.cat([documents(30, 20, 14), text(1, 64)]), Graphs(), []
    for dtype, compiled in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        model = model_as_on_a_gpu(recompute, boundaries="every_third")  # a learned cut may fall otherwise by a rounding
        model.compute_dtype = dtype
        if compiled:
            model.compile_layers(backend=graphs.backend, fullgraph=True)
        loss = model(ids, ids, 2, 5).loss
        loss.backward()
        results.append((loss.item(), gradients(model)))
    (exact, truth), (_, plain), (loss, found) = results
    assert loss == pytest.approx(exact, rel=1e-3) and truth.keys() == found.keys()
    for name, grad in truth.items():      # as near to the truth as bf16 is without
        if grad is not None:
            off, otherwise = ((grad - other[name]).norm() for other in (found, plain))
            assert off <= 2 * otherwise + 0.02 * grad.norm() + 1e-4, name
    # byte layers are one kind; those of the core are two, with memory and without, in the first loop and in later ones
    assert len(graphs.forward) == len(graphs.backward) == 5


@pytest.mark.slow
def test_the_backward_pass_recomputes_a_layer_but_never_its_routing(as_on_a_gpu):
    ids, products = text(2, 64), {}
    for recompute in (True, False):
        graphs = Graphs()
        model = model_as_on_a_gpu(recompute)
        model.compile_layers(backend=graphs.backend, fullgraph=True)
        model(ids, ids, 2, 5).loss.backward()
        assert any("aten.sort" in target for graph in graphs.forward for target in graph)
        assert not any("aten.sort" in target for graph in graphs.backward for target in graph)
        products[recompute] = sum(target.startswith("aten.mm") for graph in graphs.backward for target in graph)
    assert products[True] > products[False]


@pytest.mark.slow
def test_graphs_settle_with_the_first_step_whatever_the_segments_documents_and_loops_of_later_ones(as_on_a_gpu):
    model, rates, made = model_as_on_a_gpu(), set(), []
    model.compile_layers(backend="eager", fullgraph=True)
    optimizers = Optimizers(model, OptimizerSettings("adamw"))
    for step in range(12):
        with torch.no_grad():
            model.boundary_predictor[2].bias.fill_((-2.0, 0.5, -1.0)[step % 3])
        ids = text(4, 64, seed=step)
        if step % 2:
            ids = torch.cat([documents(*(8,) * (step % 4), 64 - 8 * (step % 4), seed=step + i) for i in range(4)])
        rates.add(step_alone(model, optimizers, [Batch.of(ids, ids, step)], 2 + step % 3)["bytes_per_segment"])
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert max(rates) > 1.5 * min(rates) and made == [5] * 12
    assert not torch._dynamo.utils.counters["graph_break"]


def test_evaluation_and_decoding_are_not_compiled():
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


def test_a_core_whose_graph_would_break_is_not_compiled_and_the_reason_is_logged():
    model = Spider(small_config())
    assert "only in bf16" in model.compile_layers(backend="eager")
    model.compute_dtype = torch.bfloat16
    model.set_backend("tile")
    assert "--moe_backend grouped" in model.compile_layers(backend="eager")
    assert model.core.layers[0].compiled is None and model.prelude[0].compiled is not None
    model.set_backend("grouped")
    assert model.compile_layers(backend="eager") is None and model.core.layers[0].compiled is not None


# ---------------------------------------------------------------------------------------------------------------------
# Who chooses it, and what goes with it

@pytest.fixture
def gpu(monkeypatch):
    """Says that there is a GPU of a capability, on which torch.compile works or not."""
    def pretend(capability=(9, 0), obstacle=None):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: capability >= (8, 0))
        monkeypatch.setattr(machine, "obstacle_to_compile", lambda device: obstacle)
        return torch.device("cuda")
    return pretend


def test_auto_compiles_on_a_gpu_and_takes_bf16_where_the_hardware_has_it_and_never_fp8(gpu):
    for capability, precision in (((9, 0), "bf16"), ((8, 9), "bf16"), ((12, 0), "bf16"), ((8, 0), "bf16"),
                                  ((7, 5), "fp32")):
        assert resolve_compile("auto", gpu(capability))[0]
        assert resolve_precision("auto", gpu(capability))[0] == precision
    assert resolve_precision("fp8", gpu((8, 9)))[0] == "fp8"
    assert resolve_compile("auto", gpu(obstacle="there is no Triton")) == (False, "there is no Triton")


def test_a_cpu_compiles_only_when_it_is_told_to(gpu):
    gpu()
    assert not resolve_compile("auto", torch.device("cpu"))[0] and resolve_compile("on", torch.device("cpu"))[0]


def test_compilation_that_was_asked_for_and_does_not_work_is_an_error(gpu):
    with pytest.raises(UsageError, match="--compile: there is no Triton; or use --compile off"):
        resolve_compile("on", gpu(obstacle="there is no Triton"))


def test_what_keeps_a_small_function_from_compiling_is_one_line(monkeypatch):
    def broken(function):
        raise RuntimeError(*message)
    monkeypatch.setattr("torch.compile", broken)
    for message, said in ((("no compiler\nand much more",), "no compiler"), ((), "RuntimeError")):
        obstacle = machine.obstacle_to_compile(torch.device("cpu"))
        assert f"({said})" in obstacle and "python3-dev" in obstacle and "\n" not in obstacle
    monkeypatch.setattr("torch.compile", lambda function: lambda x: 2 * function(x))
    assert "fails here" in machine.obstacle_to_compile(torch.device("cpu"))
    monkeypatch.setattr("torch.compile", lambda function: function)
    assert machine.obstacle_to_compile(torch.device("cpu")) is None


@pytest.mark.parametrize("compile", ("on", "auto"))
def test_layers_that_fail_to_compile_run_uncompiled_under_auto_and_end_the_run_in_one_line_under_on(
        compile, tmp_path, shards, monkeypatch, capsys):
    def broken(function, **settings):
        def fail(*args):
            raise RuntimeError
        return fail if function.__name__ == "in_one_graph" else function
    monkeypatch.setattr("torch.compile", broken)
    monkeypatch.setattr(train, "resolve_compile", lambda name, device: (True, ""))
    status = train.command_line(run_flags(shards, tmp_path / "run", "--compile", compile, steps=2))
    said = capsys.readouterr().err
    assert "torch.compile fails here (RuntimeError)" in said and "Traceback" not in said
    if compile == "auto":
        assert status == 0 and len(metrics(tmp_path / "run")) == 2 and "the layers run uncompiled" in said
    else:
        assert status == 2 and said.splitlines()[-1].startswith("train.py: error: --compile: ")


def test_the_flag_alone_means_on():
    for argv, value in (([], "auto"), (["--compile"], "on"), (["--compile", "on"], "on"), (["--compile", "off"], "off"),
                        (["--compile", "auto"], "auto"), (["--compile", "--precision", "fp8"], "on")):
        assert parse_args(argv, environ={}).compile == value
    with pytest.raises(UsageError, match="--compile: 'max' is not one of auto, on, off"):
        parse_args(["--compile", "max"], environ={})


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU

@pytest.mark.gpu
@pytest.mark.parametrize("precision", ("bf16", "fp8"))
def test_compiled_layers_learn_on_a_gpu_what_they_learn_without(precision):
    """Ten steps of many sizes: losses agree, and no graph is made after the two warm-up passes."""
    device, losses = torch.device("cuda"), {}
    resolve_precision(precision, device)
    for compiled in ("off", "on"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        plan = settled("--compile", "off", "--precision", precision)
        plan = replace(plan, machine=replace(plan.machine, compile=compiled == "on"), config=(small_config(
                                        hidden_size=256, intermediate_size=512, moe_intermediate_size=128, n_heads=4,
                                        q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32,
                                        v_head_dim=64)))
        model = train.build_model(plan, device)
        optimizers = Optimizers(model)
        optimizers.set_lr(0.003, 1.0)
        train.warm_up(model, BatchShape(256, 8), 2, device)
        graphs, losses[compiled] = torch._dynamo.utils.counters["stats"]["unique_graphs"], []
        for step in range(10):
            ids = text(8, 256, seed=step % 3)
            if step % 2:
                ids = torch.cat([documents(100, 156 - step, step, seed=step + i) for i in range(8)])
            batch = Batch.of(ids, ids, step).to(device)
            losses[compiled].append(step_alone(model, optimizers, [batch], 2)["loss"])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs and (compiled == "off" or graphs)
    assert losses["on"] == pytest.approx(losses["off"], rel=0.03)
