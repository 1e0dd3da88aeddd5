"""An absent GPU: Spider's models and steps on torch's fake tensors, which have a device, a shape and strides, but no
memory. Inside `stand_in` torch reports a GPU; inside `fake_tensors`, within that, every tensor is fake. Inside
`generating`, around `fake_tensors`, Inductor makes the code that it makes for the card."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from torch import fx, nn
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as autograd_config
from torch._inductor import config
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

import train
from data import Batch
from spider import packing
from spider.distributed import World
from spider.optim import Optimizers
from spider_model import Spider
from train import Plan

DEVICE = torch.device("cuda")
WORLD = World({})
WORLD.device, WORLD.all = DEVICE, bool
PROCESSORS = {80: 108, 89: 128, 90: 132, 100: 148, 120: 188}  # A100, RTX 4090, H100, B200, RTX 6000
# Presets with their own widths, and one layer of each kind.
MODELS = {"1b": "n_prelude_layers=1,n_coda_layers=1,n_recurrent_layers=2,engram_layers=1",
          "base": "n_prelude_layers=1,n_coda_layers=1",
          "original": "n_prelude_layers=1,n_coda_layers=1,n_recurrent_layers=2,engram_layers=1"}
LOOPS = {"1b": 2, "base": 1, "original": 2}


@contextmanager
def stand_in(architecture: int = 90):
    """Make torch report one GPU of an architecture."""
    train.logger.remove()
    torch.set_float32_matmul_precision("high")
    major, minor = divmod(architecture, 10)
    properties = SimpleNamespace(
        name=f"sm_{architecture}", major=major, minor=minor, multi_processor_count=PROCESSORS[architecture],
        total_memory=150 << 30, warp_size=32, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536, L2_cache_size=60 << 20)
    answers = dict(
        is_available=True, get_device_capability=(major, minor), is_bf16_supported=True, device_count=1,
        get_device_name=properties.name, current_device=0, get_device_properties=properties, set_device=None,
        is_current_stream_capturing=False, get_rng_state=torch.zeros(16, dtype=torch.uint8), set_rng_state=None,
        synchronize=None, _exchange_device=0, _maybe_exchange_device=0, exchange_device=0, maybe_exchange_device=0,
        _lazy_init=None, get_raw_stream=0)
    of_driver = dict(get_current_target=GPUTarget("cuda", architecture, 32), get_active_torch_device=DEVICE,
                     get_device_interface=torch.cuda)                 # that compiling asks for
    triton.runtime.driver.set_active(SimpleNamespace(**{name: always(of_driver[name]) for name in of_driver}))
    with ExitStack() as stack:
        for owner, name in product((torch.cuda, CudaInterface), answers):
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, staticmethod(always(answers[name]))))
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", always(None)))
        stack.enter_context(mock.patch("tile_moe.find_obstacle", always(None)))               # it reads values
        # Constants of the host are not copied to the device.
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        yield


def always(answer):
    """Make a function that answers the same to any arguments."""
    return lambda *_, **__: answer


@contextmanager
def fake_tensors():
    """Make all tensors fake."""
    packing.rotary_frequencies.cache_clear()                          # fake tensors belong to one mode
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    packing.rotary_frequencies.cache_clear()


def settle(model: str, *flags: str) -> Plan:
    """Settle the plan of a step of a model of MODELS, which train.py's flags may change."""
    small = [f"--model={model}", f"--set={MODELS[model]}", f"--n_loops={LOOPS[model]}", "--seq_len=256",
             "--micro_batch=16", "--compile=off", "--recompute=core", "--moe_backend=grouped"]
    return train.settle(train.parse_args([*small, *flags], environ={}), WORLD)


def absent(config) -> Spider:
    """Make a model on the GPU; its weights are never initialized."""
    with torch.device("cuda"):
        model = Spider(config)
    model.to_empty = model.init_weights = always(None)
    return model


def build(plan: Plan, compiled: bool = False) -> tuple[Spider, Optimizers]:
    """Build a plan's model and optimizers like train.py."""
    model = train.build_model(replace(plan, model_class=absent), WORLD)
    optimizers = train.optimizers_of(plan, model)
    optimizers.set_lr(plan.lr, 1.0)
    if compiled:
        assert model.compile_layers(fullgraph=True) is None
    return model, optimizers


def batch_of(plan: Plan, documents: int) -> Batch:
    """Make the batch of a micro-step."""
    ids = torch.empty(plan.micro_batch, plan.seq_len, dtype=torch.int64, device=DEVICE)
    cu_seqlens = torch.empty(documents + 1, dtype=torch.int32, device=DEVICE)
    return Batch(ids, torch.empty_like(ids), 1 << 20, cu_seqlens, ids.numel(), ids.numel())


def step(plan: Plan, model: nn.Module, optimizers: Optimizers, documents: int):
    """Run an optimizer step with this number of documents in each micro-step."""
    batches = [batch_of(plan, documents)] * plan.grad_accum
    train.step_alone(model, optimizers, batches, plan.n_loops, grad_clip=0.5)        # the norm is read as 1


def exported(spider: Spider) -> nn.Module:
    """Wrap a model like an export does."""
    from spider import modeling_spider as adapter
    spider.float = lambda: spider         # it is in fp32; fake parameters cannot be replaced
    config = adapter.SpiderHFConfig(vars(spider.config), dtype=torch.bfloat16)
    with mock.patch.object(adapter, "Spider", lambda config: spider):
        return adapter.SpiderForCausalLM(config).eval()


class Graph:
    """A graph for which Inductor has made code."""

    running = False                       # whether one of them is

    def __init__(self, lowering):
        self.source, self.module, self.backward = lowering.codegen()[0].value, lowering.orig_gm, lowering.is_backward
        self.inputs = [*self.module.graph.find_nodes(op="placeholder")]
        self.outputs = [*self.module.graph.output_node().args[0]]
        self.__file__ = self.key = ""     # Inductor logs them
        with V.set_graph_handler(lowering):                           # bytes that each Triton kernel reads and writes
            self.moved = [node.get_read_write_buffers_sizes() for node in lowering.scheduler.nodes
                          if not node.is_extern()]
        self.runs = 0

    def call(self, args):
        self.runs, Graph.running = self.runs + 1, True
        with fx.traceback.preserve_node_meta():                       # refusals.place reads it
            results = fx.Interpreter(self.module).run(*args)
        Graph.running = False
        return results


class OnHost(TorchDispatchMode):
    """Make on the host what is made on a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return func(*args, **kwargs | (dict(device="cpu") if "device" in kwargs else {}))


@contextmanager
def generating():
    """Yield the list of all graphs made inside; inside `gpu.stand_in`, around `gpu.fake_tensors`."""
    graphs, fold = [], UniformValueConstantFolder._deduce_value

    def keep(lowering):
        graphs.append(Graph(lowering))
        return graphs[-1]

    def fold_on_host(self, node):
        with OnHost():                    # constants that Inductor folds are real tensors
            return fold(self, node)
    with (mock.patch("torch._inductor.graph.GraphLowering.compile_to_module", keep),
          mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", always(None)),
          mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", always([])),      # their addresses
          mock.patch("torch._inductor.fx_passes.joint_graph.lazy_init", always(None)),       # patterns of real tensors
          mock.patch.object(UniformValueConstantFolder, "_deduce_value", fold_on_host),
          mock.patch("torch.manual_seed", always(None)),
          config.patch(fx_graph_cache=False, compile_threads=1, use_static_cuda_launcher=False),
          autograd_config.patch(enable_autograd_cache=False)):
        yield graphs
