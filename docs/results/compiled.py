"""What torch.compile makes of a training step, without a GPU: graphs, kernels, bytes, what is kept, code for sm_90.

    export FAKE_CUDA=DIR/fake_cuda.so PYTHONPATH=.
    DIR/bin/python docs/results/compiled.py --precision bf16                  # and other flags of train.py; minutes
    KERNELS=1 DIR/bin/python docs/results/compiled.py --precision bf16    # Triton's part of the code compiled as well

DIR is what ../shared/tools/rehearsal/setup.sh makes: torch 2.11 built for CUDA, and a stand-in for a device's guards
and streams. Tensors are fake and say that they lie on an H200; Dynamo, AOTAutograd and Inductor do what they do, up to
the code that they generate. That code is counted and, with KERNELS, its Triton kernels are compiled as Inductor's own
workers do it, for compute capability 9.0; it is not run: a graph's operations run on the fake tensors in its place.
"""

import ctypes
import os
import re
import sys
import time
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

shim = ctypes.CDLL(os.environ["FAKE_CUDA"], mode=ctypes.RTLD_GLOBAL)  # before torch: it takes the hooks it finds
import torch  # noqa: E402

shim.install_guard()
import torch._functorch.config  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from torch._inductor import config as inductor  # noqa: E402
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import spider_model
import train
from spider.model.segments import _documents_and_segments, _SumRows
from spider.training import batches, optim

RATE = 3.3                                # bytes per segment
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
                       total_memory=150_109_880_320, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
                       shared_memory_per_block_optin=232_448, regs_per_multiprocessor=65_536, L2_cache_size=62_914_560)
# Kernels of an operation that is more than one, eager or in generated code, by counts of others or of its source.
KERNELS = {"sort": 5, "topk": 2, "cumsum": 2, "_varlen_attn": 2, "_varlen_attn_backward": 4, "_grouped_mm": 2,
           "slice_backward": 2, "select_backward": 2, "constant_pad_nd": 2, "split_with_sizes_backward": 2,
           "nonzero": 3, "_embedding_bag": 3}
NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "alias",
             "_local_scalar_dense", "_unsafe_view", "set_", "resize_", "device"}


class Driver:
    """What Triton asks of a driver while it compiles."""
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda


class OnHost(TorchDispatchMode):
    """Constants that Inductor folds, real tensors, are made where there is memory."""
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class Graph:
    """A graph that Inductor has generated code for; called, it computes its operations on fake tensors."""
    made: list["Graph"] = []
    running = 0                           # graphs that are being called: what they compute is not counted as eager

    def __init__(self, lowering, source: str):
        self.source, self.module, self.backward, self.runs = source, lowering.orig_gm, lowering.is_backward, 0
        self.__file__ = self.key = ""     # which Inductor logs
        self.bytes = lowering.count_bytes()[0]                                               # read and written
        code = source[source.index("def call("):]
        extern = re.findall(r"extern_kernels\.(\w+)\(|(?:torch\.ops\.\w+|(?<!\.)\baten)\.(\w+)[.\w]*\(", code)
        self.calls = Counter(a or b for a, b in extern) + Counter(triton=len(re.findall(r"triton_\w+\.run\(", code)))
        self.kernels = sum(n * KERNELS.get(name, 1) for name, n in self.calls.items())

    def kept(self) -> float:
        """Bytes that a forward graph returns, results and what its backward graph reads, beside its inputs."""
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
        """In place of GraphLowering.compile_to_module, which would load what was generated."""
        cls.made.append(cls(lowering, lowering.codegen()[0].value))
        return cls.made[-1]


class Eager(TorchDispatchMode):
    """Counts kernels outside of compiled graphs, by phase and operation."""
    phase = "forward"

    def __init__(self):
        super().__init__()
        self.kernels = Counter()

    @classmethod
    def is_infra_mode(cls):               # else Dynamo compiles nothing
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if not (Graph.running or view or name in NO_KERNEL) and any(t.is_cuda for t in tensors):
            many = -(-len(args[0]) // 30) if name.startswith("_foreach") else KERNELS.get(name, 1)
            self.kernels[Eager.phase, name] += many
        return out


def sum_segments(h, b, cu_seqlens, open_segment=None, count=[]):
    """segments.sum_segments, the number of segments not read from the device but RATE's, another each time."""
    count.append(1)
    document, finished = _documents_and_segments(b, cu_seqlens)
    segment_cu_seqlens = F.pad(finished, (1, 0)).index_select(0, cu_seqlens)
    segments = int(len(h) / (RATE - 0.1 * (len(count) % 3)))
    own = finished - b.detach().round().long()
    own = torch.where(own < segment_cu_seqlens.index_select(0, document + 1), own, segments + document)
    before = b.cumsum(0) - b
    before = before - before.index_select(0, cu_seqlens.index_select(0, document))
    weight = 1 + before - before.detach()
    rows = segments + len(cu_seqlens) - 1
    total = weight.new_zeros(rows, 1).index_add(0, own, weight[:, None])
    z = _SumRows.apply(h, weight, own, rows)
    return z, total, segment_cu_seqlens.to(torch.int32)


def pretend(stack: ExitStack):
    """A machine with an H200, for torch, Dynamo, Inductor and Triton; what each would ask of the driver is answered."""
    def patch(target, value):
        stack.enter_context(mock.patch(target, value))

    rng_state, deduce = torch.zeros(16, dtype=torch.uint8), UniformValueConstantFolder._deduce_value

    def deduce_on_host(self, node):
        with OnHost():
            return deduce(self, node)
    answers = dict(is_available=True, is_bf16_supported=True, device_count=1, current_device=0, get_rng_state=rng_state,
                   get_device_capability=(9, 0), get_device_properties=H200, get_device_name=H200.name,
                   is_current_stream_capturing=False, synchronize=None, set_rng_state=None, _exchange_device=0,
                   _maybe_exchange_device=0, set_device=None, _lazy_init=None)
    interface = dict(get_device_properties=H200, current_device=0, exchange_device=0, maybe_exchange_device=0,
                     set_device=None, synchronize=None, is_bf16_supported=True, device_count=1, get_raw_stream=0)
    for name, value in answers.items():
        patch(f"torch.cuda.{name}", lambda *_, value=value, **__: value)
    for name, value in interface.items():
        patch(f"torch._dynamo.device_interface.CudaInterface.{name}", staticmethod(lambda *_, value=value, **__: value))
    triton.runtime.driver.set_active(Driver())
    patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", lambda: None)          # generated kernels do it
    patch("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None)
    patch("torch._inductor.graph.GraphLowering.compile_to_module", lambda lowering: Graph.make(lowering))
    patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: [])               # their addresses
    patch("torch._inductor.fx_passes.joint_graph.lazy_init", lambda *_: None)                # patterns of real tensors
    patch("torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value", deduce_on_host)
    stack.enter_context(inductor.patch(fx_graph_cache=False, compile_threads=1, use_static_cuda_launcher=False))
    stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
    patch("spider.model.segments.sum_segments", sum_segments)
    patch("spider_model.Spider.init_weights", lambda self: None)
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def build(argv: list[str]):
    args = train.parse_args(["--model", "1b", "--seq_len", "256", "--micro_batch", "112", *argv], environ={})
    device = torch.device("cuda")
    train.take_recipe(args, device)
    train.take_batch(args, 1)
    args.compile = "on" if args.compile == "auto" else args.compile
    with device:
        model = spider_model.Spider(train.model_config(args))
    model.to_empty = lambda device: model
    train.take_horizon(args, model, args.n_loops)
    train.take_recompute(args, model, args.n_loops, "muon", args.precision, device)
    with mock.patch("torch.manual_seed"):
        train.materialize(model, device, args.precision, "grouped", args)
    return args, model


def batch_of(args, documents: int) -> batches.Batch:
    ids = torch.empty(args.micro_batch, args.seq_len, dtype=torch.int64, device="cuda")
    cu_seqlens = torch.empty(documents + 1, dtype=torch.int32, device="cuda")
    return batches.Batch(ids, torch.empty_like(ids), 1 << 20, cu_seqlens, ids.numel(), ids.numel())


def compile_kernels(graph: Graph) -> tuple[int, int, float]:
    """Compiles a graph's Triton kernels for sm_90 -> how many, in how many configurations, CPU seconds."""
    from torch._inductor.codecache import PyCodeCache
    kernels, configurations, start = 0, 0, time.process_time()
    definition = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'", re.S)
    for name, source in definition.findall(graph.source):
        kernel = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)
        kernels, configurations = kernels + 1, configurations + len(kernel.compile_results)
        assert all("cubin" in result.kernel.asm for result in kernel.compile_results), name
    return kernels, configurations, time.process_time() - start


def main(argv: list[str]):
    train.logger.remove()
    torch.set_float32_matmul_precision("high")
    with ExitStack() as stack:
        pretend(stack)
        args, model = build(argv)
        optimizers = optim.Optimizers(model, "muon", args)
        optimizers.set_lr(1e-4, 1.0)
        backward = torch.Tensor.backward

        def in_backward(*args, **kwargs):
            Eager.phase = "backward"
            backward(*args, **kwargs)
            Eager.phase = "forward"
        stack.enter_context(mock.patch.object(torch.Tensor, "backward", in_backward))
        for step in range(3):
            eager, made, start = Eager(), len(Graph.made), time.process_time()
            for graph in Graph.made:
                graph.runs = 0
            with eager:
                sums, tokens = train.accumulate(model, [batch_of(args, args.micro_batch + 7 * step)] * args.grad_accum,
                                                args.n_loops)
                Eager.phase = "update"
                torch.nn.utils.clip_grad_norm_(optimizers.dense, args.grad_clip)
                optimizers.step()
                model.update_expert_bias(tokens)
                optimizers.zero_grad()
                Eager.phase = "forward"
            print(f"step {step}: {len(Graph.made) - made} graphs made, {time.process_time() - start:.0f} s of CPU time",
                  flush=True)
    compiled = 0
    for graph in Graph.made:
        if graph.runs:
            compiled += graph.runs * graph.kernels
            print(f"{'backward' if graph.backward else 'forward'} graph, {graph.runs} runs of {graph.kernels} kernels: "
                  f"{dict(graph.calls)}; {graph.bytes / 1e6:,.0f} MB moved"
                  + f", {graph.kept() / 1e6:,.0f} MB returned" * (not graph.backward))
    print(f"in graphs {compiled:,} kernels, {sum(g.runs * g.bytes for g in Graph.made) / 1e9:.0f} GB moved")
    phases = Counter()
    for (phase, _), number in eager.kernels.items():
        phases[phase] += number
    print(f"outside of them {phases.total():,}: {dict(phases)}; together {compiled + phases.total():,}")
    for phase in phases:
        most = Counter({name: n for (p, name), n in eager.kernels.items() if p == phase}).most_common(12)
        print(f"  {phase}: " + ", ".join(f"{name} {n}" for name, n in most))
    print(f"breaks: {dict(torch._dynamo.utils.counters['graph_break']) or 'none'}")
    for graph in Graph.made if os.environ.get("KERNELS") else ():
        kernels, configurations, seconds = compile_kernels(graph)
        print(f"{kernels} Triton kernels in {configurations} configurations compiled for sm_90, {seconds:.0f} s of CPU "
              f"time", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
