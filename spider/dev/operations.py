"""Count the operations of a step on fake tensors: kernels, FLOPs, bytes, and lower bounds of time.

`Trace` records every Operation inside it; `fused_seconds` bounds the time that a compiler could reach."""

import math
import re
import weakref
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from spider.dev.absent_gpu import Card

ATTENTION = 0.38                          # FlashAttention 2 on Hopper, of the bf16 rate: optimistic at short sequences
FLOOR = 2.0e-6                            # s, the shortest kernel: assumed
LAUNCH = 4.5e-6                           # s of the host per kernel of an eager operation, at least: assumed

NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "alias",
             "_unsafe_view", "set_", "resize_", "device", "is_same_size"}

# Kernels per eager operation, one by default. Sorting, scans and attention vary with sizes.
KERNELS = {"sort": 5, "topk": 2, "cumsum": 2, "cummax": 2, "_varlen_attn": 2, "_varlen_attn_backward": 4,
           "_grouped_mm": 2, "_scaled_grouped_mm": 2, "_embedding_bag": 3, "slice_backward": 2, "select_backward": 2,
           "constant_pad_nd": 2, "index_add": 2, "index_copy": 2, "scatter": 2, "baddbmm": 2, "nonzero": 3}
GATHERS = {"index_select", "embedding", "gather", "index", "_embedding_bag", "_embedding_bag_forward_only"}
WRITES_ROWS = {"index_add_": 2, "index_copy_": 1, "scatter_": 1, "index_put_": 1}  # passes over the written rows
FOREACH_TENSORS, FOREACH_NUMBERS = 36, 320 * 65536  # maximum per kernel over a list of tensors


def grouped_flops(a, b, *_, **__) -> float:
    """Count the FLOPs of a product of rows [P, D] by group, or of two such for a weight's gradient."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.dim() == 3 else 1)


def attention_flops(q, cu_seqlens) -> float:
    """Count the FLOPs of both causal products of rows [N, H, width] in documents of one length."""
    rows, heads, width = q.shape
    return 2 * 2 * rows * heads * width * rows / (len(cu_seqlens) - 1) / 2


OWN_FLOPS = {                             # for operations without a formula in torch
    "_grouped_mm": grouped_flops, "_scaled_grouped_mm": grouped_flops,
    "_varlen_attn": lambda q, k, v, cu_seqlens, *_, **__: attention_flops(q, cu_seqlens),
    "_varlen_attn_backward": lambda grad, q, k, v, out, lse, cu_seqlens, *_, **__: 2.5 * attention_flops(q, cu_seqlens),
}


@dataclass
class Operation:
    name: str
    phase: str                            # cast, forward, recomputation, backward, optimizer or rest
    module: str                           # name, its numbers left out
    shapes: str
    kernels: int
    flops: float
    moved: float                          # bytes read and written
    rate: str                             # kind of its products: bf16, fp8, fp32, attention; else elementwise
    reads: list[tuple[int, int]]          # (number of a storage, bytes)
    writes: list[tuple[int, int]]

    def seconds(self, card: Card) -> float:
        """Return a lower bound of its time on a card."""
        if not self.kernels:
            return 0.0
        rate = ATTENTION * card.bf16 if self.rate == "attention" else getattr(card, self.rate, math.inf)
        return max(self.flops / rate, self.moved / card.bandwidth, FLOOR * self.kernels)


def nbytes(t: Tensor) -> int:
    """Count the bytes that a kernel reads of a tensor; expanded dimensions count once."""
    return math.prod(size for size, stride in zip(t.shape, t.stride()) if stride) * t.element_size()


def tensors(tree) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def shape_of(t: Tensor) -> str:
    dtype = str(t.dtype).removeprefix("torch.").replace("bfloat", "b").replace("float", "f")
    return "x".join(map(str, t.shape)) + ":" + dtype


class Trace(TorchDispatchMode):
    """Record every operation inside, with its origin. `segments`: the number that the host reads from the device."""

    def __init__(self, segments: int):
        super().__init__()
        self.operations: list[Operation] = []
        self.segments, self.phase, self.waits = segments, "rest", 0
        self.stack: list[str] = []        # names of the modules whose forward runs
        self.module_of: dict[int, str] = {}  # of an autograd node, by its number
        self.numbers: dict[int, int] = {}   # of a storage that lives
        self.fresh = count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented         # torchao's FP8 tensor: its inner operations are dispatched here again
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        if name == "_local_scalar_dense":
            self.waits += 1
            return self.segments if not args[0].is_floating_point() else 1.0
        out = func(*args, **kwargs)
        if self.phase == "forward":
            node = torch._C._autograd._get_sequence_nr() - 1  # the last one created
            self.module_of.setdefault(node, self.stack[-1] if self.stack else "")
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
        return Operation(name, phase, self.module(), shapes, kernels, flops, self.bytes_of(name, given, written), rate,
                         [self.number(t) for t in given], [self.number(t) for t in written])

    def bytes_of(self, name, given, written) -> float:
        out = sum(nbytes(t) for t in written)
        if name in WRITES_ROWS:           # only the written rows, not the whole tensor
            return sum(nbytes(t) for t in given[1:]) + WRITES_ROWS[name] * nbytes(given[-1])
        if name in GATHERS:
            return min(nbytes(given[0]), out) + sum(nbytes(t) for t in given[1:]) + out
        moved = sum(nbytes(t) for t in {id(t): t for t in given}.values()) + out
        return moved + 2 * out if name == "baddbmm" else moved  # it copies its first operand

    def module(self) -> str:
        name = self.stack[-1] if self.stack else ""
        if self.phase == "backward" and not self.stack:
            node = torch._C._current_autograd_node()
            name = self.module_of.get(node._sequence_nr(), "") if node is not None else ""
        return re.sub(r"\.\d+", "", name)

    def number(self, t: Tensor) -> tuple[int, int]:
        """Return a unique number of a tensor's storage, and the bytes read or written."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.numbers:
            self.numbers[key] = next(self.fresh)
            weakref.finalize(storage, self.numbers.pop, key, None)
        return self.numbers[key], nbytes(t)


BARRIERS = {"sort", "topk", "cumsum", "cummax", "searchsorted", "index_add", "index_add_", "index_copy", "scatter",
            "scatter_", "_embedding_bag", "embedding", "_embedding_bag_forward_only"}  # cannot be fused


def fused_seconds(operations: list[Operation], card: Card) -> float:
    """Return a lower bound of the step's time if all operations between two products were one kernel, which reads its
    inputs once and writes only what is read later. Foreach operations are not fused."""
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
