"""A training step on a GPU that is not there: what it would launch, move, multiply and hold.

    python bench.py --rehearse h200                                            # the table; minutes, no GPU
    python bench.py --rehearse h200 --flags="--precision fp8 --grad_accum 4"   # one setting, by train.py's flags

The step is train.py's own. Its tensors are torch's fake ones, which have a device, a shape and strides but no memory:
every operation passes the checks of a CUDA build, and none computes. Each is counted as it passes by: kernels, FLOPs
(torch's formulas), bytes; MemTracker of torch.distributed follows what is alive. Where the host reads the device, it
is told the config's bytes per segment. A time is a bound from below: what a card multiplies and moves at its rates, and no kernel
shorter than FLOOR.
"""

import ctypes
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import spider_model
import train
from spider.model import packing
from spider.training import batches, machine
from spider.training.memory import estimate_memory
from spider.training.optim import Optimizers
from spider.training.sharding import Unsharded

if __name__ == "__main__":                # before torch, which else finds its own CUDA first
    library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)


class RehearsalError(Exception):
    """It cannot be rehearsed here; the message is one line that names the remedy."""


@dataclass(frozen=True)
class Card:
    """What is known of a GPU: products in FLOP/s, memory in bytes and bytes/s."""
    name: str
    capability: tuple[int, int]
    bf16: float
    fp8: float
    fp32: float                           # as torch multiplies it here: in TF32
    bandwidth: float
    memory: float
    processors: int                       # streaming multiprocessors
    source: str


# Of published peaks four fifths are taken, of published bandwidths 0.83: what an H200 reaches of its own.
CARDS = {
    "h200": Card("NVIDIA H200", (9, 0), 790e12, 1450e12, 395e12, 4.0e12, 150.1e9, 132,
                 "bf16 and copies (4.3 TB/s; 4.0 for the kernels of a step) measured on one by others, FP8 and TF32 "
                 "assumed at the same share of their published peaks"),
    "h100": Card("NVIDIA H100 80GB", (9, 0), 790e12, 1450e12, 395e12, 2.8e12, 85.0e9, 132,
                 "bf16 and copies (3.0 TB/s) measured on one by others, the rest as of an H200"),
    "rtx6000": Card("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 400e12, 800e12, 200e12, 1.49e12, 102.0e9, 188,
                    "published: dense 504 (bf16), 1008 (FP8), 252 (TF32) TFLOP/s, 1.79 TB/s, 96 GB; shares assumed"),
    "b200": Card("NVIDIA B200", (10, 0), 1800e12, 3600e12, 900e12, 6.6e12, 192.0e9, 148,
                 "published: dense 2250 (bf16), 4500 (FP8), 1125 (TF32) TFLOP/s, 8 TB/s, 192 GB; shares assumed"),
}
ATTENTION = 0.38                          # FlashAttention 2 on Hopper, of the bf16 rate: optimistic at short sequences
FLOOR = 2.0e-6                            # s, the shortest kernel: assumed
LAUNCH = 4.5e-6                           # s of the host a kernel, the least that an eager operation costs: assumed

# ---------------------------------------------------------------------------------------------------------------------
# A device that is not there

# Autograd asks a device for streams and guards, and a CUDA build has them from a driver. These say: one device, nothing
# to wait for. Registered with precedence, after torch is loaded and before it asks.
SHIM = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
namespace {
const Device here(DeviceType::CUDA, 0);
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return here; }
  Device getDevice() const override { return here; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, here); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, here); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, here); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
}
namespace at {
struct AbsentCUDA : CUDAHooksInterface {
  AbsentCUDA(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", ::c10::REGISTRY_PREFERRED, AbsentCUDA)
}
extern "C" void install() { impl::registerDeviceGuard(DeviceType::CUDA, new Guard()); }
"""


def obstacle() -> str | None:
    """Why what is counted here would not be true, and the remedy; None where it would."""
    if torch.version.cuda is None:
        return (f"torch {torch.__version__} is built without CUDA, and takes some operations apart that a GPU does whole; "
                "in an environment apart (no GPU needed): pip install torch==2.11.0 torchao==0.18.0 numpy loguru")
    return no_compiler()


def no_compiler() -> str | None:
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        return "there is no C++ compiler to build the stand-in for CUDA: install g++, or name one in CXX"
    return None


def build_shim() -> Path:
    """The stand-in for CUDA as a library, built once for each torch; seconds."""
    torch_at, cache = Path(torch.__file__).parent, os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    command = [os.environ.get("CXX") or "g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_at}/include",
               f"-I{torch_at}/include/torch/csrc/api/include", f"-L{torch_at}/lib", f"-Wl,-rpath,{torch_at}/lib",
               "-Wl,--no-as-needed,--allow-shlib-undefined", "-lc10", "-ltorch_cpu"]
    mark = hashlib.blake2b(f"{torch.__version__} {command} {SHIM}".encode(), digest_size=8).hexdigest()
    library = Path(cache).expanduser() / f"spider-rehearsal-{mark}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        source, made = library.with_suffix(f".{os.getpid()}.cpp"), library.with_suffix(f".{os.getpid()}.so")
        source.write_text(SHIM)
        built = subprocess.run([*command, source, "-o", made], capture_output=True, text=True)
        source.unlink()
        if built.returncode:
            fault = next((line for line in built.stderr.splitlines() if "error" in line), built.stderr[-200:])
            raise RehearsalError(f"the stand-in for CUDA does not compile: {fault}")
        made.replace(library)
    return library


@contextmanager
def stand_in(card: Card):
    """Inside, this process has one GPU, `card`, whose tensors are fake; their backward passes need the library too."""
    properties = SimpleNamespace(
        name=card.name, major=card.capability[0], minor=card.capability[1], multi_processor_count=card.processors,
        total_memory=int(card.memory), warp_size=32, max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536, L2_cache_size=60 << 20)
    answers = {"is_available": True, "get_device_capability": card.capability, "is_bf16_supported": True,
               "get_device_name": card.name, "device_count": 1, "current_device": 0,
               "get_device_properties": properties, "is_current_stream_capturing": False}
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", lambda *_, answer=answer, **__: answer))
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None))
        stack.callback(packing.frequencies.cache_clear)  # a fake tensor is of its mode alone
        packing.frequencies.cache_clear()
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


# ---------------------------------------------------------------------------------------------------------------------
# Operations, counted as they pass by


NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "alias",
             "_unsafe_view", "set_", "resize_", "device", "is_same_size"}

# Of an eager operation; one that is not here is one kernel. Sorting, scans and attention vary with sizes.
KERNELS = {"sort": 5, "topk": 2, "cumsum": 2, "cummax": 2, "_varlen_attn": 2, "_varlen_attn_backward": 4,
           "_grouped_mm": 2, "_scaled_grouped_mm": 2, "_embedding_bag": 3, "slice_backward": 2, "select_backward": 2,
           "constant_pad_nd": 2, "index_add": 2, "index_copy": 2, "scatter": 2, "baddbmm": 2, "nonzero": 3}
GATHERS = {"index_select", "embedding", "gather", "index", "_embedding_bag", "_embedding_bag_forward_only"}
WRITES_ROWS = {"index_add_": 2, "index_copy_": 1, "scatter_": 1, "index_put_": 1}  # passes over rows that they write
FOREACH_TENSORS, FOREACH_NUMBERS = 36, 320 * 65536  # most that a kernel over a list of tensors takes


def grouped_flops(a, b, *_, **__) -> float:
    """Of a product of rows [P, D] by group, or of two such for a weight's gradient."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.dim() == 3 else 1)


def attention_flops(q, cu_seqlens) -> float:
    """Of both causal products of rows [N, H, width] in documents of one length."""
    rows, heads, width = q.shape
    return 2 * 2 * rows * heads * width * rows / (len(cu_seqlens) - 1) / 2


OWN_FLOPS = {                             # what torch has no formula for
    "_grouped_mm": grouped_flops, "_scaled_grouped_mm": grouped_flops,
    "_varlen_attn": lambda q, k, v, cu_seqlens, *_, **__: attention_flops(q, cu_seqlens),
    "_varlen_attn_backward": lambda grad, q, k, v, out, lse, cu_seqlens, *_, **__: 2.5 * attention_flops(q, cu_seqlens),
}


@dataclass
class Operation:
    name: str
    phase: str                            # cast, forward, recomputation, backward, optimizer or rest
    place: str                            # module, its numbers left out
    shapes: str
    kernels: int
    flops: float
    moved: float                          # bytes read and written
    rate: str                             # of its products: bf16, fp8, fp32, attention; else elementwise
    reads: list[tuple[int, int]]          # storages, numbered, and bytes
    writes: list[tuple[int, int]]

    def seconds(self, card: Card) -> float:
        """The least that it takes on a card."""
        if not self.kernels:
            return 0.0
        rate = ATTENTION * card.bf16 if self.rate == "attention" else getattr(card, self.rate, math.inf)
        return max(self.flops / rate, self.moved / card.bandwidth, FLOOR * self.kernels)


def nbytes(t: Tensor) -> int:
    """Of what a kernel reads of a tensor: where a dimension is expanded, its one row."""
    return math.prod(size for size, stride in zip(t.shape, t.stride()) if stride) * t.element_size()


def tensors(tree) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def shape_of(t: Tensor) -> str:
    dtype = str(t.dtype).removeprefix("torch.").replace("bfloat", "b").replace("float", "f")
    return "x".join(map(str, t.shape)) + ":" + dtype


class Trace(TorchDispatchMode):
    """Every operation inside it, and where it came from. `segments`: what the host reads of the device."""

    def __init__(self, segments: int):
        super().__init__()
        self.operations: list[Operation] = []
        self.segments, self.phase, self.waits = segments, "rest", 0
        self.stack: list[str] = []        # names of the modules whose forward runs
        self.place_of: dict[int, str] = {}  # of an autograd node, by its number
        self.numbers: dict[int, int] = {}   # of a storage that lives
        self.fresh = count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented         # torchao's FP8 tensor: its own operations come by here
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        if name == "_local_scalar_dense":
            self.waits += 1
            return self.segments if not args[0].is_floating_point() else 1.0
        out = func(*args, **kwargs)
        if self.phase == "forward":
            node = torch._C._autograd._get_sequence_nr() - 1  # made just before
            self.place_of.setdefault(node, self.stack[-1] if self.stack else "")
        given, made = tensors((args, kwargs)), tensors(out)
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if view or name in NO_KERNEL or not any(t.is_cuda for t in given + made):
            return out
        self.operations.append(self.counted(func, name, args, kwargs, out, given, made))
        return out

    def counted(self, func, name, args, kwargs, out, given, made) -> Operation:
        formula = OWN_FLOPS.get(name) or flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=out) if formula else 0
        rate = "elementwise"
        if flops:
            first = given[0].dtype
            rate = ("attention" if name.startswith("_varlen_attn") else
                    {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(first, "fp8"))
        in_place = name.endswith("_") and not name.endswith("__")
        written = tensors(args[:1]) if in_place or name.startswith("_foreach") and not made else made
        if name == "_fused_adamw_":       # parameters and both averages are read and written, gradients read
            written = tensors((args[0], args[2], args[3]))
        kernels = KERNELS.get(name, 1)
        if name.startswith("_foreach") or name == "_fused_adamw_":
            listed = tensors(args[0])
            kernels = max(math.ceil(len(listed) / FOREACH_TENSORS),
                          math.ceil(sum(t.numel() for t in listed) / FOREACH_NUMBERS))
        phase = self.phase
        if phase == "backward" and self.stack:
            phase = "recomputation"
        shapes = " ".join(shape_of(t) for t in given[:3])
        return Operation(name, phase, self.place(), shapes, kernels, flops, self.bytes_of(name, given, written), rate,
                         [self.number(t) for t in given], [self.number(t) for t in written])

    def bytes_of(self, name, given, written) -> float:
        out = sum(nbytes(t) for t in written)
        if name in WRITES_ROWS:           # rows alone, not all that they lie in
            return sum(nbytes(t) for t in given[1:]) + WRITES_ROWS[name] * nbytes(given[-1])
        if name in GATHERS:
            return min(nbytes(given[0]), out) + sum(nbytes(t) for t in given[1:]) + out
        moved = sum(nbytes(t) for t in {id(t): t for t in given}.values()) + out
        return moved + 2 * out if name == "baddbmm" else moved  # what is added to is copied first

    def place(self) -> str:
        name = self.stack[-1] if self.stack else ""
        if self.phase == "backward" and not self.stack:
            node = torch._C._current_autograd_node()
            name = self.place_of.get(node._sequence_nr(), "") if node is not None else ""
        return re.sub(r"\.\d+", "", name)

    def number(self, t: Tensor) -> tuple[int, int]:
        """A tensor's storage, as a number that no other one had, and the bytes read or written of it."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.numbers:
            self.numbers[key] = next(self.fresh)
            weakref.finalize(storage, self.numbers.pop, key, None)
        return self.numbers[key], nbytes(t)


BARRIERS = {"sort", "topk", "cumsum", "cummax", "searchsorted", "index_add", "index_add_", "index_copy", "scatter",
            "scatter_", "_embedding_bag", "embedding", "_embedding_bag_forward_only"}  # what no fused kernel contains


def fused_seconds(operations: list[Operation], card: Card) -> float:
    """The least that the step takes if what stands between products were one kernel each time, that reads what was
    there before and writes what is read after it: a compiler could do no better. Lists of tensors stay as they are."""
    last_read, total, region = {}, 0.0, []
    for i, operation in enumerate(operations):
        last_read.update((number, i) for number, _ in operation.reads)

    def close(end: int) -> float:
        made, read = {}, {}
        for operation in region:
            for number, size in operation.reads:
                if number not in made:
                    read[number] = max(size, read.get(number, 0))
            for number, size in operation.writes:
                made[number] = max(size, made.get(number, 0))
        stays = sum(size for number, size in made.items() if last_read.get(number, -1) >= end)
        return max((sum(read.values()) + stays) / card.bandwidth, FLOOR) if region else 0.0
    for i, operation in enumerate(operations):
        if operation.rate == "elementwise" and operation.name not in BARRIERS and (
                operation.phase in ("forward", "recomputation", "backward")):
            region.append(operation)
            continue
        total += close(i) + operation.seconds(card)
        region = []
    return total + close(len(operations))


# ---------------------------------------------------------------------------------------------------------------------
# A step


@dataclass
class Step:
    """What a step of some flags would cost."""
    args: SimpleNamespace
    operations: list[Operation]
    peak: float                           # bytes alive at once, at most
    estimate: float                       # the same by cost.estimate_memory
    memory: dict[str, float]              # bytes by kind, then
    waits: int                            # numbers that the host waits for


class Alone(Unsharded):
    """One rank, whose backward passes are marked in a trace."""

    def __init__(self, trace: Trace, tracker: MemTracker):
        self.trace, self.tracker, self.casts = trace, tracker, 0

    def backward(self, model, loss, last):
        casts = [t for module in model.modules() for t in tensors(getattr(module, "cast", None))]
        self.casts = sum({s: s.nbytes() for t in casts for s in get_untyped_storages(t)}.values())
        self.trace.phase = "backward"
        super().backward(model, loss, last)
        self.trace.phase = "rest"
        self.tracker.reset_mod_stats()    # which are of one pass


def build(args) -> tuple[spider_model.Spider, Optimizers, float]:
    """Model and optimizers as train.py makes them, with the state that optimizers have after a step; and the bytes that
    its estimate says."""
    device, optimizer = torch.device("cuda"), "muon" if args.optimizer == "auto" else args.optimizer
    with mock.patch.object(spider_model.Spider, "init_weights", lambda self: None):
        with device:
            model = spider_model.Spider(train.model_config(args))
        model.to_empty = lambda device: model  # it lies there already
        backend = "grouped" if args.moe_backend == "auto" else args.moe_backend
        train.take_recompute(args, model, args.n_loops, optimizer, args.precision, device)
        train.materialize(model, device, args.precision, backend, args)
    train.take_horizon(args, model, args.n_loops)
    optimizers = Optimizers(model, optimizer, args)
    optimizers.set_lr(args.lr, 1.0)
    for p in optimizers.dense:
        p.grad = torch.empty_like(p)
    for table in optimizers.tables:
        table.gather(torch.zeros(1, dtype=torch.int64, device=device), table.weight.new_zeros(1, table.weight.shape[1]))
    optimizers.step()
    optimizers.zero_grad()
    estimate = estimate_memory(model, args.n_loops, args, optimizer, args.precision, device, args.recompute)
    return model, optimizers, sum(estimate.values())


def rehearse(card: Card, argv: list[str]) -> Step:
    """One optimizer step by train.py's flags."""
    args = train.parse_args(["--model", "1b", "--seq_len", "256", "--micro_batch", "112", *argv], environ={})
    device = torch.device("cuda")
    train.take_recipe(args, device)
    train.take_batch(args, 1)
    with stand_in(card):
        if args.precision == "auto":
            args.precision, _ = machine.resolve_precision("auto", device, compiles=False)
        torch.set_float32_matmul_precision("high")
        model, optimizers, estimate = build(args)
        ids = torch.empty(args.micro_batch, args.seq_len, dtype=torch.int64, device=device)
        cu_seqlens = torch.empty(args.micro_batch + 1, dtype=torch.int32, device=device)
        batch = batches.Batch(ids, torch.empty_like(ids), 1 << 20, cu_seqlens, ids.numel(), ids.numel())
        trace, tracker = Trace(int(ids.numel() / model.config.bytes_per_segment)), MemTracker()
        tracker.track_external(model, *optimizers.by_name.values(), batch.ids, batch.labels, batch.cu_seqlens)
        model.sharding = sharding = Alone(trace, tracker)
        with marked(model, optimizers, trace), tracker, trace:
            trace.phase = "cast"
            sums, tokens = train.accumulate(model, [batch] * args.grad_accum, args.n_loops)
            train.update(model, optimizers, sums, tokens, batch.real * args.grad_accum, args)
        memory = {getattr(kind, "value", kind): size
                  for kind, size in tracker.get_tracker_snapshot("peak")[torch.device("cuda", 0)].items()}
        del model, optimizers, batch
    return Step(args, trace.operations, memory.pop("Total"), estimate, kinds(memory, sharding.casts), trace.waits)


def kinds(memory: dict[str, float], casts: float) -> dict[str, float]:
    """MemTracker's kinds in words, without those that hold nothing; it takes what weights were cast to for
    activations."""
    casts = min(casts, memory["Activation"])
    named = {"activations": memory["Activation"] - casts, "parameters": memory["Parameter"],
             "optimizer": memory["Optstate"], "gradients": memory["Gradient"], "weights cast": casts,
             "temporaries, gathered for tables": memory["Temp"], "the rest": memory["Buffer"] + memory["Other"]}
    return {kind: size for kind, size in named.items() if size > 5e6}


@contextmanager
def marked(model, optimizers, trace: Trace):
    """Inside, the trace knows phases, and the modules whose forward runs."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module, _):
        if module is model:
            trace.phase = "forward"
        elif module in names:
            trace.stack.append(names[module])

    def leave(module, *_):
        if module is not model and module in names:
            trace.stack.pop()

    def step(original=optimizers.step):
        trace.phase = "optimizer"
        original()
        trace.phase = "rest"
    optimizers.step = step
    handles = [nn.modules.module.register_module_forward_pre_hook(enter),
               nn.modules.module.register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------------------------------------------------------
# What is said of it


def summary(card: Card, step: Step) -> dict:
    """A step's figures in plain values: numbers, and rows of the largest operations and of places."""
    def largest(key, count):
        seconds, kernels, moved, sums = Counter(), Counter(), Counter(), []
        for operation in step.operations:
            which = key(operation)
            seconds[which] += operation.seconds(card)
            kernels[which] += operation.kernels
            moved[which] += operation.moved
        for which, spent in seconds.most_common(count):
            sums.append((*which, spent, kernels[which], moved[which]))
        return sums
    seconds = sum(o.seconds(card) for o in step.operations)
    update = sum(o.kernels for o in step.operations if o.phase in ("cast", "optimizer", "rest"))
    kernels = sum(o.kernels for o in step.operations)
    return dict(
        bytes=step.args.micro_batch * step.args.seq_len * step.args.grad_accum, precision=step.args.precision,
        kernels=kernels, kernels_of_a_micro_step=(kernels - update) // step.args.grad_accum,
        kernels_of_the_update=update, seconds=seconds, fused=fused_seconds(step.operations, card),
        flops=sum(o.flops for o in step.operations),
        peak=step.peak, estimate=step.estimate, recompute=step.args.recompute, memory=step.memory,
        waits=step.waits, by_rate=largest(lambda o: (o.rate,), 5),
        by_phase=largest(lambda o: (o.phase,), 9), by_place=largest(lambda o: (o.place, o.phase), 16),
        by_operation=largest(lambda o: (o.name,), 16), by_shape=largest(lambda o: (o.name, o.phase, o.shapes), 16))


def in_child(card: str, flags: list[str]) -> dict:
    """The summary of a step by train.py's flags, worked out by a process of its own: what stands in for CUDA must be
    there before torch is, and a GPU that is there is not touched. In a build without CUDA shapes are checked, but
    counts are not true. RehearsalError where that fails."""
    if reason := no_compiler():
        raise RehearsalError(reason)
    done = subprocess.run([sys.executable, __file__, str(build_shim()), card, json.dumps(flags)], capture_output=True,
                          text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    if done.returncode:
        last = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RehearsalError(f"a step of {' '.join(flags)} fails: {last[-1]}")
    return json.loads(done.stdout)


LONG = dict(seq_len=2048, micro_batch=64)
SETTINGS = {                              # of the table, by train.py's flags; 112 x 256 where they do not say otherwise
    "bf16": dict(precision="bf16", recompute="core"),
    "bf16, 4 micro-steps": dict(precision="bf16", recompute="core", grad_accum=4),
    "fp8": dict(precision="fp8", recompute="core"),
    "bf16, nothing recomputed": dict(precision="bf16", recompute="nothing"),
    "bf16, all recomputed": dict(precision="bf16", recompute="all"),
    "bf16, 64 x 2048": dict(precision="bf16", recompute="core", **LONG),
    "fp8, 64 x 2048": dict(precision="fp8", recompute="core", **LONG),
}

# The layers and loops of 1b with next to nothing in them: what is left of a step's time is the host's.
HOST_SIZES = ("hidden_size=32,n_heads=2,q_lora_rank=16,kv_lora_rank=16,qk_nope_head_dim=8,qk_rope_head_dim=8,"
              "v_head_dim=16,intermediate_size=32,n_routed_experts=2,moe_intermediate_size=16,engram_rows=300,"
              "engram_dim=8,engram_byte_rows=300,engram_byte_dim=8")
BLIND = """
Not seen: what happens inside a kernel, so no tile that is half empty, no bank conflict, no cache that helps; memory
that the allocator cannot hand out for its holes, and the context's own (about 0.5 GB); pinned copies; torch.compile
(`ideally fused` is what no compiler can beat, with every elementwise operation between two products in one kernel);
documents shorter than a sequence, unbalanced experts, segments that halt early; clocks, power, other ranks. How many
kernels an operation takes is assumed (rehearsal.KERNELS). Times are bounds from below."""


def card_of(name: str) -> str | None:
    """The card of CARDS that a GPU's name says it is, None for another one."""
    return next((key for key, card in CARDS.items() if name.startswith(card.name)), None)


MISS = 1.5                                # times its bound, beyond which a figure is to be looked at


def against_bounds(measured: list[dict], found: dict[str, dict]) -> tuple[list[dict], list[dict]]:
    """Rows of measured figures beside the rehearsed ones, and those that miss theirs by more than MISS, worst first.
    measured: rows with `step` and some of `ms`, `peak GB`, `kernels`, `host, ms`, whose bound is the GPU's own time."""
    rows = []
    for row in measured:
        if (one := found.get(row["step"])) is None:
            continue
        bounds = {"ms": one["seconds"] * 1e3, "peak GB": one["peak"] / 1e9, "kernels": one["kernels"],
                  "host, ms": one["seconds"] * 1e3}
        rows += [{"step": row["step"], "figure": figure, "measured": row[figure], "rehearsed": bound,
                  "times": row[figure] / bound}
                 for figure, bound in bounds.items() if isinstance(row.get(figure), (int, float))]
    return rows, sorted((row for row in rows if row["times"] > MISS), key=lambda row: -row["times"])


def row_of(card: Card, name: str, found: dict) -> dict:
    """A line of the table."""
    return {"step": name, "kernels": found["kernels"], "of a micro-step": found["kernels_of_a_micro_step"],
            "of the update": found["kernels_of_the_update"], "GPU, ms": found["seconds"] * 1e3,
            "bytes/s": found["bytes"] / found["seconds"], "ideally fused, ms": found["fused"] * 1e3,
            "bytes/s, fused": found["bytes"] / found["fused"], "launches, host ms": found["kernels"] * LAUNCH * 1e3,
            "peak GB": found["peak"] / 1e9, "estimated GB": found["estimate"] / 1e9,
            "fits": "yes" if found["peak"] < card.memory else "NO"}


def details(found: dict[str, dict]) -> dict[str, list[dict]]:
    """Tables beside it: memory by kind of every step, and of the first where its time goes."""
    kinds = dict.fromkeys(kind for one in found.values() for kind in one["memory"])
    memory = [{"at the peak, GB": kind} | {name: one["memory"].get(kind, 0) / 1e9 for name, one in found.items()}
              for kind in kinds]
    name, first = next(iter(found.items()))

    def rows(key, *columns):
        return [dict(zip((*columns, "ms", "kernels", "GB moved"),
                         (*row[:-3], row[-3] * 1e3, row[-2], row[-1] / 1e9))) for row in first[key]]
    return {"memory by kind": memory, f"{name}: by phase": rows("by_phase", "phase"),
            f"{name}: by kind": rows("by_rate", "kind"),
            f"{name}: largest operations": rows("by_operation", "operation"),
            f"{name}: the same by shape": rows("by_shape", "operation", "phase", "operands"),
            f"{name}: by module": rows("by_place", "module", "phase")}


if __name__ == "__main__":
    library.install()
    train.logger.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rehearse(CARDS[sys.argv[2]], json.loads(sys.argv[3]))
    print(json.dumps(summary(CARDS[sys.argv[2]], found)))
