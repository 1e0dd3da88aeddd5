"""Compile a training step without a GPU: generate the code for a card, and count graphs, kernels and bytes.

    python bench.py --rehearse h200 --compiled                                 # minutes; bf16
    python bench.py --rehearse h200 --compiled --flags="--precision fp8"       # other flags of train.py
    KERNELS=1 python bench.py --rehearse h200 --compiled                       # compile the Triton kernels as well

Dynamo, AOTAutograd and Inductor generate the same code as on the card. That code is counted and, with KERNELS, its
Triton kernels are compiled like in Inductor's workers. It is not run: the operations of a graph run on fake tensors
instead. Eager operations are counted like in rehearsal.py."""

import os
import re
import time
from collections import Counter
from contextlib import ExitStack
from types import ModuleType
from unittest import mock

import torch
import torch._functorch.config
import triton
from torch._inductor import config as inductor
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from spider.dev.absent_gpu import Card, build, fake_batch, fake_tensors, settle, stand_in
from spider.dev.operations import KERNELS, Trace
from spider.training.sharding import Unsharded

STEPS = 3                                 # the last one is counted; the first two compile for varying sizes


class Driver:
    """Provide the driver interface that Triton needs to compile."""

    def __init__(self, card: Card):
        self.capability = 10 * card.capability[0] + card.capability[1]

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda


class OnHost(TorchDispatchMode):
    """Create the constants that Inductor folds, real tensors, on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class Graph:
    """A graph for which Inductor has generated code; a call runs its operations on fake tensors."""
    made: list["Graph"] = []
    running = 0                           # graphs in execution, whose operations do not count as eager

    def __init__(self, lowering, source: str):
        self.source, self.module, self.backward, self.runs = source, lowering.orig_gm, lowering.is_backward, 0
        self.__file__ = self.key = ""     # Inductor logs them
        self.bytes = lowering.count_bytes()[0]                                               # read and written
        code = source[source.index("def call("):]
        extern = re.findall(r"extern_kernels\.(\w+)\(|(?:torch\.ops\.\w+|(?<!\.)\baten)\.(\w+)[.\w]*\(", code)
        self.calls = Counter(a or b for a, b in extern) + Counter(triton=len(re.findall(r"triton_\w+\.run\(", code)))
        self.kernels = sum(n * KERNELS.get(name, 1) for name, n in self.calls.items())

    def kept(self) -> float:
        """Return the bytes of a forward graph's outputs other than its inputs: results, and tensors saved for
        backward."""
        outputs = {node for node in self.module.graph.output_node().args[0] if isinstance(node, torch.fx.Node)}
        values = [node.meta["val"] for node in outputs if node.op != "placeholder"]
        return sum(torch.ops.aten.sym_numel(v).node.hint * v.itemsize if isinstance(v.numel(), torch.SymInt)
                   else v.numel() * v.itemsize for v in values if isinstance(v, torch.Tensor))

    def call(self, args):
        Graph.running, self.runs = Graph.running + 1, self.runs + 1
        try:
            return torch.fx.Interpreter(self.module).run(*args)
        finally:
            Graph.running -= 1

    @classmethod
    def make(cls, lowering):
        """Replace GraphLowering.compile_to_module, which would load the generated code."""
        cls.made.append(cls(lowering, lowering.codegen()[0].value))
        return cls.made[-1]


class Eager(Trace):
    """Count eager operations. The number of segments that the host reads varies from step to step."""

    def __init__(self, bytes_at_once: int, rate: float):
        super().__init__(0)
        self.bytes_at_once, self.rate = bytes_at_once, rate                                  # bytes, bytes per segment

    @classmethod
    def is_infra_mode(cls):               # else Dynamo compiles nothing
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if Graph.running:
            return func(*args, **(kwargs or {}))
        self.segments = int(self.bytes_at_once / (self.rate - 0.1 * (self.waits % 3)))
        return super().__torch_dispatch__(func, types, args, kwargs)


class InPhases(Unsharded):
    """Mark backward passes in a trace."""

    def __init__(self, trace: Trace):
        self.trace = trace

    def backward(self, model, loss, last):
        self.trace.phase = "backward"
        super().backward(model, loss, last)
        self.trace.phase = "forward"


def pretend(stack: ExitStack, card: Card):
    """Fake the driver calls of Dynamo, Inductor and Triton, inside `stand_in`."""
    def patch(target, value):
        stack.enter_context(mock.patch(target, value))

    deduce = UniformValueConstantFolder._deduce_value

    def deduce_on_host(self, node):
        with OnHost():
            return deduce(self, node)
    properties = torch.cuda.get_device_properties()
    answers = dict(get_rng_state=torch.zeros(16, dtype=torch.uint8), synchronize=None, set_rng_state=None,
                   _exchange_device=0, _maybe_exchange_device=0, set_device=None, _lazy_init=None)
    interface = dict(get_device_properties=properties, current_device=0, exchange_device=0, maybe_exchange_device=0,
                     set_device=None, synchronize=None, is_bf16_supported=True, device_count=1, get_raw_stream=0)
    for name, value in answers.items():
        patch(f"torch.cuda.{name}", lambda *_, value=value, **__: value)
    for name, value in interface.items():
        patch(f"torch._dynamo.device_interface.CudaInterface.{name}", staticmethod(lambda *_, value=value, **__: value))
    triton.runtime.driver.set_active(Driver(card))
    patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", lambda: None)          # generated kernels do it
    patch("torch._inductor.graph.GraphLowering.compile_to_module", lambda lowering: Graph.make(lowering))
    patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: [])               # their addresses
    patch("torch._inductor.fx_passes.joint_graph.lazy_init", lambda *_: None)                # patterns of real tensors
    patch("torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value", deduce_on_host)
    patch("torch.manual_seed", lambda *_: None)
    stack.enter_context(inductor.patch(fx_graph_cache=False, compile_threads=1, use_static_cuda_launcher=False))
    stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))


def compile_kernels(graph: Graph) -> dict:
    """Compile a graph's Triton kernels for the card; count them and their configurations."""
    from torch._inductor.codecache import PyCodeCache
    kernels, configurations, start = 0, 0, time.process_time()
    definition = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'", re.S)
    for name, source in definition.findall(graph.source):
        kernel = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)
        kernels, configurations = kernels + 1, configurations + len(kernel.compile_results)
        assert all("cubin" in result.kernel.asm for result in kernel.compile_results), name
    return {"Triton kernels": kernels, "configurations": configurations, "CPU s": time.process_time() - start}


def compile_step(card: Card, flags: list[str], trainer: ModuleType) -> dict[str, list[dict]]:
    """Compile a step with train.py's flags; return tables of its graphs and of eager operations."""
    torch.set_float32_matmul_precision("high")
    made = []
    with ExitStack() as stack:
        stack.enter_context(stand_in(card))
        plan = settle(trainer, flags)
        pretend(stack, card)
        stack.enter_context(fake_tensors())
        model, optimizers = build(trainer, plan)
        if obstacle := model.compile_layers():
            made.append({"step": f"only byte layers are compiled: {obstacle}"})
        for step in range(STEPS):
            before, start = len(Graph.made), time.process_time()
            for graph in Graph.made:
                graph.runs = 0
            batch = fake_batch(plan, plan.batch.micro_batch + 7 * step)
            with Eager(batch.real, plan.config.bytes_per_segment) as eager:
                do_step(trainer, plan, model, optimizers, batch, eager)
            made.append({"step": step, "graphs made": len(Graph.made) - before, "CPU s": time.process_time() - start})
        return {"compilation": made} | tables(eager)


def do_step(trainer: ModuleType, plan, model, optimizers, batch, eager: Eager):
    model.sharding, eager.phase = InPhases(eager), "forward"
    sums, counts = trainer.accumulate(model, [batch] * plan.batch.grad_accum, plan.n_loops)
    eager.phase = "update"
    trainer.update(model, optimizers, sums, counts, batch.real * plan.batch.grad_accum, plan.optimizer.grad_clip)


def tables(eager: Eager) -> dict[str, list[dict]]:
    """Return the tables of the last step."""
    graphs = [graph for graph in Graph.made if graph.runs]
    rows = [{"graph": "backward" if graph.backward else "forward", "runs": graph.runs, "kernels": graph.kernels,
             "MB moved": graph.bytes / 1e6, "MB returned": None if graph.backward else graph.kept() / 1e6,
             "calls": ", ".join(f"{name} {n}" for name, n in graph.calls.most_common())} for graph in graphs]
    kernels, names = Counter(), {}
    for operation in eager.operations:
        kernels[operation.phase] += operation.kernels
        names.setdefault(operation.phase, Counter())[operation.name] += operation.kernels
    inside = sum(graph.runs * graph.kernels for graph in graphs)
    where = [{"kernels": "in graphs", "number": inside,
              "most": f"{sum(graph.runs * graph.bytes for graph in graphs) / 1e9:.0f} GB moved"}]
    where += [{"kernels": f"outside, {phase}", "number": number,
               "most": ", ".join(f"{name} {n}" for name, n in names[phase].most_common(12))}
              for phase, number in kernels.items()]
    where.append({"kernels": "together", "number": inside + kernels.total()})
    breaks = [{"graph break": reason, "times": n} for reason, n in torch._dynamo.utils.counters["graph_break"].items()]
    found = {"graphs": rows, "a step": where, "graph breaks": breaks or [{"graph break": "none"}]}
    if os.environ.get("KERNELS"):
        found["Triton"] = [compile_kernels(graph) for graph in Graph.made]
    return found
