"""The generated code of compiled layers computes their operations: each kernel runs in Triton's
interpreter.

A graph runs several times on the same random inputs: as generated code, as its own operations in
fp32, and as its own operations in their own dtypes, which round like the code. Each result of the
code must be as near to fp32 as the operations in their own dtypes. All runs use the code's choice
of experts, which has its own check, because rounding may flip near-ties."""

import copy
import math
import re

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch._C._dynamo import guards
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import interpreting  # noqa: F401  fixes Triton's interpreter
from rehearsal import gpu
from rehearsal.gpu import Graph, OnHost
from rehearsal.peaks import LAYERS
from rehearsal.refusals import Watch

pytestmark = pytest.mark.rehearsal
ENVIRONMENT = {"TRITON_INTERPRET": "1"}
MARGIN = 1.5  # allowed error, relative to the error of the own operations
RUNS = 4  # runs in the own dtypes; a single run is too small a sample of rounding
EXPERTS = 6
# No width is a power of two, so masks matter; reductions over hidden_size take several blocks.
SMALL = (
    "hidden_size=1040,n_heads=2,q_lora_rank=48,kv_lora_rank=48,qk_nope_head_dim=32,"
    "qk_rope_head_dim=16,"
    f"v_head_dim=48,intermediate_size=112,n_routed_experts={EXPERTS},moe_intermediate_size=48,"
    "engram_rows=200,"
    f"engram_dim=8"
)
LOW = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
PLANTED = {  # pattern, replacement, largest number of replacements (0: no limit)
    # of active tokens
    "a dropped mask": (r"tl\.where\((tmp\d+), (tmp\d+), tmp\d+\)", r"\2", 1),
    # of the rotary partner
    "a shifted index": (r"\(-(\d+)\) \+ x0\) % ", r"(-\1) + 1 + x0) % ", 0),
    # keeps only the last block
    "a missing reduction": (r"(tmp\d+) = _tmp\d+ \+ (tmp\d+)\n", r"\1 = \2\n", 0),
}


# References. Inductor generates neither products nor attention, so both sides use these functions.


def attention_of(q: Tensor, k: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return causal attention weights in documents: [tokens, H, width] -> [H, tokens, tokens]."""
    token = torch.arange(len(q))
    document = torch.searchsorted(cu_seqlens[1:], token, right=True)
    score = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    return score.masked_fill(
        (document[:, None] != document) | (token[:, None] < token), -math.inf
    ).softmax(-1)


def varlen_attn(q, k, v, cu_seqlens, *_):
    out = torch.einsum("hqk,khd->qhd", attention_of(q, k, cu_seqlens), v.float())
    log_sum = torch.zeros(q.shape[1], len(q))  # only backward reads it
    return out.to(q.dtype).contiguous(), log_sum, torch.zeros(2, dtype=torch.uint64)


def varlen_attn_backward(grad, q, k, v, out, log_sum, cu_seqlens, *_):
    p = attention_of(q, k, cu_seqlens)
    grad = grad.float()
    grad_p = torch.einsum("qhd,khd->hqk", grad, v.float())
    grad_score = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    grads = (
        torch.einsum("hqk,khd->qhd", grad_score, k.float()),
        torch.einsum("hqk,qhd->khd", grad_score, q.float()),
        torch.einsum("hqk,qhd->khd", p, grad),
    )
    return tuple(t.to(q.dtype).contiguous() for t in grads)


def mm(a, b, out_dtype=None, out=None):
    product = a.float() @ b.float()
    return product.to(out_dtype or a.dtype) if out is None else out.copy_(product)


def scaled_mm(a, b, scale_a, scale_b, *_, out_dtype=torch.bfloat16, out=None, **__):
    return mm(a.float() * scale_a, b.float() * scale_b, out_dtype, out)


def grouped_mm(a, b, offs, *_, **__):
    if a.dim() == b.dim() == 2:
        # on sm_100 a gradient from zero rows stays uninitialized (pytorch issue 172439)
        assert (offs.diff(prepend=offs.new_zeros(1)) > 0).all(), "an expert without rows"
    return torch._grouped_mm(a, b, offs)


REFERENCES = {
    "_varlen_attn": varlen_attn,
    "_varlen_attn_backward": varlen_attn_backward,
    "mm": mm,
    "_scaled_mm": scaled_mm,
    "_grouped_mm": grouped_mm,
}


class Own(OnHost):
    """Run operations on the host, all in fp32 if `wide`. `order`: replaces the order of each
    token's experts when scores are sorted; `scores`: the sorted scores."""

    def __init__(self, order: Tensor | None = None, wide: bool = False):
        super().__init__()
        self.order = order
        self.wide = wide
        self.scores = None

    def run(self, graph: Graph, args: list, nudge: float = 0.0) -> list:
        """Run a graph on copies of inputs, which are perturbed by a relative `nudge`."""
        args = copy.deepcopy(args)
        for arg in args if nudge else ():
            if isinstance(arg, Tensor) and arg.dtype in (torch.bfloat16, torch.float32):
                arg.mul_(1 + nudge * torch.randn(arg.shape))
        with self:
            return torch.fx.Interpreter(graph.module).run(*self.widened(args))

    def widened(self, tree):
        def widen(value):
            if isinstance(value, torch.dtype):
                return torch.float32 if value in LOW else value
            return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value

        return tree_map(widen, tree) if self.wide else tree

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            str(func) == "aten.sort.stable"
            and self.order is not None
            and args[0].is_floating_point()
        ):
            self.scores = args[0]
            return args[0].gather(1, self.order), self.order
        reference = REFERENCES.get(func._schema.name.split("::")[1], func)
        return super().__torch_dispatch__(reference, types, *self.widened((args, kwargs)))


class Kernel:
    """A generated Triton kernel, launched as by Inductor, but with small blocks, so that several
    blocks share the work."""

    def __init__(self, name: str, source: str, device_str: str):
        module = PyCodeCache.load(
            re.sub(r"@triton_heuristics\..*?\n\)\n(?=@triton\.jit)", "", source, flags=re.S)
        )
        module.libdevice = module.tl_math = tl.math
        self.function = getattr(module, name)

    def run(self, *args, stream=None):
        names = self.function.arg_names
        parameters = [name for name in names if not name.endswith("BLOCK")]
        given = dict(zip(parameters, args, strict=True))
        blocks = dict(XBLOCK=1024, YBLOCK=64, R0_BLOCK=256)
        if {"YBLOCK", "R0_BLOCK"} & {*names}:
            blocks["XBLOCK"] = 64
        if "R0_BLOCK" not in names and "r0_numel" in names:  # persistent reduction
            blocks["XBLOCK"] = 8
        grid = [-(-given.get(axis + "numel", 1) // blocks[axis.upper() + "BLOCK"]) for axis in "xy"]
        self.function[(*grid, 1)](*args, **{name: n for name, n in blocks.items() if name in names})


def run_generated(source: str, args: list) -> list:
    """Run the code generated for a graph."""
    # the interpreter would call Inductor's max2 for every number
    triton_helpers.max2 = lambda x, dim: tl.max(x, dim)
    AsyncCompile.triton = Kernel
    guards._empty_strided_cuda = guards._empty_strided_cpu
    torch._C._cuda_getCurrentRawStream = gpu.always(0)
    module, args = {}, copy.deepcopy(args)
    with Own():
        exec(compile(source, "<generated>", "exec"), module)
        return list(module["call"](args))


def inputs_of(graph: Graph, known: dict) -> list:
    """Draw the inputs of a graph, except inputs in `known`, which forward saved for backward."""
    values = {node.name: node.meta["val"] for node in graph.inputs}
    tokens = next(
        int(value.shape[0])
        for value in values.values()
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16 and value.dim() == 2
    )
    inputs = []
    for name, value in values.items():
        if name in known:
            inputs.append(known[name])
        elif isinstance(value, Tensor):
            inputs.append(draw(value, tokens))
        else:
            inputs.append(int(value))
    return inputs


def draw(like: Tensor, tokens: int) -> Tensor:
    """Draw numbers that suit a tensor of this dtype and shape."""
    dtype = like.dtype
    shape = [int(n) for n in like.shape]
    stride = [int(n) for n in like.stride()]
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if dtype == torch.int32:  # cu_seqlens of a few documents
        flat = torch.linspace(0, tokens, size).round()
    elif dtype == torch.int64:
        flat = torch.randint(0, tokens, (size,))
    elif dtype == torch.bool:
        flat = torch.rand(size) > 0.3
    elif shape == [EXPERTS]:  # the experts' bias; no token chooses the last expert
        flat = torch.tensor([0.0] * (size - 1) + [-10.0])
    elif not shape or len(shape) > 1 and shape[-1] == 1:  # FP8 scales, reciprocal norms
        flat = torch.rand(size) + 0.5
    else:
        flat = torch.randn(size) / math.sqrt(shape[-1] if len(shape) > 1 else 1)
    return flat.to(dtype).as_strided(shape, stride)


def distance(results: list, exact: list) -> list[float]:
    """Return the relative error of each result; for values that are no tensors, whether they
    differ."""
    return [
        float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-9))
        if isinstance(a, Tensor)
        else float(a != b)
        for a, b in zip(results, exact, strict=True)
    ]


def faults_of(graph: Graph, source: str, args: list) -> tuple[list[str], list]:
    """Run a graph's code; return the faults of its results, and the results. Rounding is the
    largest error of the graph's own operations over RUNS runs; all except the first perturb the
    inputs by the size of bf16's rounding."""
    results = run_generated(source, args)
    faults = []
    order = None  # each token's experts in the order chosen by the code
    for node, result in zip(graph.outputs, results, strict=True):
        if re.match(r"\(sort\w*, 1\)", str(getattr(node, "args", ""))):
            order = result
            break
    wide = Own(order, wide=True)
    own = Own(order, wide=False)
    exact = wide.run(graph, args)
    rounding = [distance(own.run(graph, args), exact)]
    if order is not None:
        tie = 4 * (own.scores - wide.scores).abs().max()
        chosen = wide.scores.gather(1, order)
        all_once = (order.sort(1).values == torch.arange(EXPERTS)).all()
        if not all_once or (chosen.diff(dim=1) > tie).any():
            faults.append("the experts are not in the order of their scores")
    rounding += [distance(own.run(graph, args, 2**-9), exact) for _ in range(RUNS - 1)]
    for i, (off, *others) in enumerate(zip(distance(results, exact), *rounding, strict=True)):
        if not off <= MARGIN * max(others) + 1e-5:
            faults.append(f"result {i}: off by {off:.2e}, by rounding {max(others):.2e}")
    return faults, results


@pytest.mark.parametrize("precision", ("bf16", "fp8"))
def test_generated_code_computes_its_graph_and_planted_faults_are_found(precision):
    gpu.stand_in()
    plan = gpu.resolve_plan(
        "1b",
        f"--precision={precision}",
        f"--set={LAYERS},{SMALL}",
        "--seq_len=32",
        "--micro_batch=2",
    )
    graphs = gpu.generating()
    known = {}  # inputs and results of the last forward graph
    found = []
    with FakeTensorMode(), Watch(24):
        gpu.step(plan, *gpu.build(plan, compiled=True), documents=3)
    torch.manual_seed(0)
    # The forward pass of a core layer in a later loop, which has a mask of active tokens
    later_loop = max(
        i
        for i, graph in enumerate(graphs)
        if not graph.backward
        and all(re.search(pattern, graph.source) for pattern, _, _ in PLANTED.values())
    )
    for i, graph in enumerate(graphs):  # each forward graph precedes its backward graph
        args = inputs_of(graph, known if graph.backward else {})
        faults, results = faults_of(graph, graph.source, args)
        found += faults
        known = {
            str(node): value
            for node, value in zip(graph.inputs + graph.outputs, args + results, strict=True)
        }
        for fault, (pattern, replacement, count) in PLANTED.items() if i == later_loop else ():
            source, changes = re.subn(pattern, replacement, graph.source, count=count)
            assert changes and faults_of(graph, source, args)[0], fault
    assert len(graphs) == 16 and not found, found
