"""An absent GPU: Spider's models and steps on torch's fake tensors, which have a device, a shape
and strides, but no memory. After `stand_in` torch reports a GPU; inside `FakeTensorMode` every
tensor is fake; after `generating` Inductor generates the card's code. Each test has its own process
(conftest.py), so nothing is undone."""

from types import SimpleNamespace

import torch
import triton
from loguru import logger
from torch import fx, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, config
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

import tile_moe
import train
from data import Batch
from rehearsal.peaks import MODELS
from spider.training import distributed, optim
from spider.training import resolve as plans
from spider.training.plan import Plan
from spider_model import Spider

DEVICE = torch.device("cuda")
WORLD = distributed.World({})
WORLD.device = DEVICE
WORLD.all = bool
PROCESSORS = {80: 108, 89: 128, 90: 132, 100: 148, 120: 188}  # A100, RTX 4090, H100, B200, RTX 6000


def always(answer):
    """Return a function that returns `answer` for any arguments."""
    return lambda *_, **__: answer


def stand_in(architecture: int = 90):
    """Let torch report one GPU of an architecture."""
    logger.remove()
    properties = SimpleNamespace(
        name=f"sm_{architecture}",
        major=architecture // 10,
        minor=architecture % 10,
        multi_processor_count=PROCESSORS[architecture],
        total_memory=150 << 30,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
    )
    answers = dict(
        is_available=True,
        device_count=1,
        current_device=0,
        get_device_name=properties.name,
        is_bf16_supported=True,
        get_device_properties=properties,
        get_device_capability=divmod(architecture, 10),
        set_device=None,
        _exchange_device=0,
        _maybe_exchange_device=0,
        _lazy_init=None,
        is_current_stream_capturing=False,
        get_rng_state=torch.zeros(16, dtype=torch.uint8),
        set_rng_state=None,
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, always(answer))
    CudaInterface.get_device_properties = always(properties)
    CudaInterface.is_bf16_supported = always(True)
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_target=always(GPUTarget("cuda", architecture, 32)))
    )
    tile_moe.find_obstacle = always(None)  # it reads values
    fake_tensor.init_gpu_context = always(None)
    FakeTensorMode.avoid_device_init = True  # otherwise host constants are copied to the GPU


def resolve_plan(model: str, *flags: str) -> Plan:
    """Return the plan of a step of a model of MODELS, with changes by train.py's flags."""
    small = (
        f"--model={model} {MODELS[model]} --seq_len=256 --micro_batch=16 --compile=off "
        f"--recompute=core --moe_backend=grouped"
    )
    command = train.parse_args([*small.split(), *flags], environ={})
    return plans.resolve_plan(command, train.RECIPES, WORLD)


def build(plan: Plan, compiled: bool = False) -> tuple[Spider, optim.Optimizers]:
    """Build a plan's model and optimizers as train.py does."""

    def absent(config) -> Spider:
        with DEVICE:
            model = Spider(config)
        model.to_empty = model.float = always(model)  # fake parameters cannot be replaced
        return model

    model = train.build_model(absent(plan.config), plan, WORLD)
    optimizers = train.optimizers_of(plan.flags, model)
    optimizers.set_lr(plan.flags.lr, 1.0)
    if compiled:
        assert model.compile_layers(fullgraph=True) is None
    return model, optimizers


def batch_of(plan: Plan, documents: int, max_seqlen: int | None = None) -> Batch:
    """Make the batch of a micro-step. max_seqlen: bound of document lengths, by default seq_len."""
    ids = torch.empty(plan.flags.micro_batch, plan.flags.seq_len, dtype=torch.int64, device=DEVICE)
    cu_seqlens = torch.empty(documents + 1, dtype=torch.int32, device=DEVICE)
    return Batch(
        ids,
        torch.empty_like(ids),
        1 << 20,
        cu_seqlens,
        max_seqlen or plan.flags.seq_len,
        ids.numel(),
        ids.numel(),
    )


def step(
    plan: Plan,
    model: nn.Module,
    optimizers: optim.Optimizers,
    documents: int,
    max_seqlen: int | None = None,
    **settings: float,
):
    """Run an optimizer step with this number of documents per micro-step, see batch_of. settings:
    fields of StepSettings."""
    batches = [batch_of(plan, documents, max_seqlen)] * plan.flags.grad_accum
    now = train.StepSettings(plan.flags.n_loops, **settings)
    # Watch reads the norm as 1
    train.train_step(model, optimizers, batches, now, grad_clip=0.5)


class Graph:
    """A graph for which Inductor has generated code."""

    running = False  # whether any graph is running

    def __init__(self, lowering):
        self.source = lowering.codegen()[0].value
        self.module = lowering.orig_gm
        self.backward = lowering.is_backward
        self.inputs = [*self.module.graph.find_nodes(op="placeholder")]
        self.outputs = [*self.module.graph.output_node().args[0]]
        self.__file__ = self.key = ""  # Inductor logs both
        with V.set_graph_handler(lowering):  # bytes read and written by each Triton kernel
            self.moved = [
                node.get_read_write_buffers_sizes()
                for node in lowering.scheduler.nodes
                if not node.is_extern()
            ]
        self.runs = 0

    def call(self, args):
        self.runs += 1
        Graph.running = True
        with fx.traceback.preserve_node_meta():  # for refusals.current_line
            results = fx.Interpreter(self.module).run(*args)
        Graph.running = False
        return results


class OnHost(TorchDispatchMode):
    """Create tensors on the host instead of a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = dict(kwargs or {})
        if "device" in options:
            options["device"] = "cpu"
        return func(*args, **options)


def generating() -> list[Graph]:
    """Let Inductor generate code for the card; return the list that collects all graphs."""
    graphs = []
    folder = joint_graph.UniformValueConstantFolder
    fold = folder._deduce_value

    def keep(lowering):
        graphs.append(Graph(lowering))
        return graphs[-1]

    def fold_on_host(self, node):
        with OnHost():  # Inductor folds real tensors
            return fold(self, node)

    GraphLowering.compile_to_module = keep
    folder._deduce_value = fold_on_host
    joint_graph.lazy_init = always(None)  # its patterns need real tensors
    triton_helpers.set_driver_to_gpu = always(None)
    compile_fx.get_input_idxs_to_check = always([])  # fake tensors have no addresses
    config.compile_threads = 1
    config.use_static_cuda_launcher = False
    torch.compiler.config.force_disable_caches = True
    return graphs
