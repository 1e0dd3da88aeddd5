"""Find calls that kernels of a real GPU refuse although fake tensors accept them, and lines where
the host waits for the GPU.

Fake tensors run only the checks in torch's meta functions. REFUSALS has the checks that only CUDA
kernels make, read from the sources of torch 2.11; 2.13 has the same messages. The dtypes of each
kernel come from the table of torch's own tests (OpInfo)."""

import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, bfloat16, float32, int32, int64
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
# Names of operations, without the _ of in-place variants.
# Kernels that take at most one zero-dimensional host tensor, as a number:
TAKE_A_NUMBER = {
    *"add sub mul div remainder floor_divide pow maximum minimum eq ne lt le gt ge bitwise_and "
    "bitwise_or "
    "bitwise_xor logical_and logical_or where addcmul lerp masked_fill fill index_put".split()
}
COPIES = {"copy", "_to_copy", "index", "index_put"}  # between devices
MOVES = {"clone", "cat", "constant_pad_nd"}  # move or fill elements of any dtype
# The host needs the result, so it waits for the GPU:
READS = {"_local_scalar_dense", "item", "is_nonzero"}
WAITS = {
    *READS,
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "bincount",
    "multinomial",
    "repeat_interleave",
}


def tensors(tree) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def mixed(*operands: Tensor) -> bool:
    return len({t.dtype for t in operands}) > 1


def misaligned(t: Tensor, *strides: int) -> bool:
    """Return whether a tensor, or a row at one of the strides, is not aligned to 16 bytes."""
    return any(n * t.element_size() % 16 for n in (t.storage_offset(), *strides))


def of(dtype: torch.dtype, *shape: int, device="cuda") -> Tensor:
    """Make an operand for an example."""
    return torch.empty(shape, dtype=dtype, device=device)


def attend(q: Tensor | None = None, v: Tensor | None = None, cu: Tensor | None = None) -> Tensor:
    q, v = (of(bfloat16, 32, 2, 16) if t is None else t for t in (q, v))
    cu = of(int32, 3) if cu is None else cu
    return varlen_attn(q, q, v, cu, cu, 32, 32)


def multiply_fp8(a: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch._scaled_mm(a, of(dtype, 16, 32).t(), of(float32), of(float32), out_dtype=bfloat16)


def update(exp_avg: Tensor, grad: Tensor):
    """Call AdamW's kernel on a weight [8, 4]."""
    torch._fused_adamw_(
        [of(float32, 8, 4)],
        [grad],
        [exp_avg],
        [of(float32, 8, 4)],
        [],
        [of(float32)],
        lr=1,
        beta1=0,
        beta2=0,
        weight_decay=0,
        eps=0,
        amsgrad=False,
        maximize=False,
    )


class Refusal(NamedTuple):
    operations: str  # "*": all
    message: str  # part of the kernel's message in torch's libraries, or one of UNCHECKED
    when: Callable  # predicate of the arguments by name
    example: Callable  # a call that fake tensors accept


# Faults that no kernel checks
WIDE_READS, NO_STRIDES, FP8_ADDRESSES = UNCHECKED = (
    "the kernel reads 16 bytes at once, from any address",
    "the kernel reads numbers side by side, whatever the stride",
    "cuBLAS has no algorithm for FP8 at addresses between multiples of 16 bytes",
)
REFUSALS = [
    Refusal(*row)
    for row in (
        # Devices: PointwiseOpsKernel.cu, TensorIterator.cpp, Generator.h below aten/src/ATen
        (
            "addcmul",
            "CPU Scalar support for ",
            lambda a: not (a.self.is_cuda and a.tensor1.is_cuda),
            lambda: torch.addcmul(of(float32, 4), of(float32, device="cpu"), of(float32, 4)),
        ),
        (
            "*",
            "Trying to pass too many CPU scalars to non-CPU kernel!",
            lambda a: a.operation in TAKE_A_NUMBER and len(a.on_host) > 1,
            lambda: torch.where(
                of(torch.bool, 4), of(float32, device="cpu"), of(float32, device="cpu")
            ),
        ),
        (
            "*",
            "Expected all tensors to be on the same device, but found at least two devices",
            lambda a: (
                a.operation not in TAKE_A_NUMBER
                and a.operation not in COPIES
                and 0 < len(a.on_host) < len(a.operands)
            ),
            lambda: torch.addcdiv(of(float32, 4), of(float32, 4), of(float32, device="cpu")),
        ),
        (
            "*",
            "' device type for generator but found '",
            lambda a: str(getattr(a.generator, "device", "")) == "cpu",
            lambda: torch.rand(4, device="cuda", generator=torch.Generator()),
        ),
        # Products: Blas.cpp, GroupedMMUtils.h
        (
            "mm bmm addmm",
            "expected mat1 and mat2 to have the same dtype, but got: ",
            lambda a: mixed(*a.operands),
            lambda: torch.addmm(of(float32, 4), of(bfloat16, 4, 4), of(bfloat16, 4, 4)),
        ),
        (
            "_grouped_mm _scaled_grouped_mm",
            "expected data_ptr to be aligned to 16 bytes",
            lambda a: misaligned(a.self) or misaligned(a.mat2),
            lambda: F.grouped_mm(
                of(bfloat16, 513)[1:].view(32, 16), of(bfloat16, 2, 16, 16), offs=of(int32, 2)
            ),
        ),
        (
            "_grouped_mm _scaled_grouped_mm",
            NO_STRIDES,
            lambda a: not a.offs.is_contiguous(),
            lambda: F.grouped_mm(
                of(bfloat16, 32, 16), of(bfloat16, 2, 16, 16), offs=of(int32, 4)[::2]
            ),
        ),
        (
            "_scaled_mm",
            "Multiplication of two Float8_e5m2 matrices is not supported",
            lambda a: a.self.dtype == a.mat2.dtype == torch.float8_e5m2,
            lambda: multiply_fp8(of(torch.float8_e5m2, 16, 32), torch.float8_e5m2),
        ),
        (
            "_scaled_mm",
            FP8_ADDRESSES,
            lambda a: misaligned(a.self) or misaligned(a.mat2),
            lambda: multiply_fp8(of(torch.float8_e4m3fn, 520)[8:].view(16, 32)),
        ),
        # Attention: flash_api.cpp, which does not check whether rows start at multiples of 16 bytes
        (
            "_varlen_attn",
            "FlashAttention only support fp16 and bf16 data type",
            lambda a: a.query.dtype not in (bfloat16, torch.float16),
            lambda: attend(of(float32, 32, 2, 16)),
        ),
        (
            "_varlen_attn",
            "query and key must have the same dtype",
            lambda a: mixed(a.query, a.key, a.value),
            lambda: attend(v=of(torch.float16, 32, 2, 16)),
        ),
        (
            "_varlen_attn",
            "cu_seqlens_q must have dtype int32",
            lambda a: {a.cu_seq_q.dtype, a.cu_seq_k.dtype} != {int32},
            lambda: attend(cu=of(int64, 3)),
        ),
        (
            "_varlen_attn",
            "cu_seqlens_q must be contiguous",
            lambda a: not (a.cu_seq_q.is_contiguous() and a.cu_seq_k.is_contiguous()),
            lambda: attend(cu=of(int32, 6)[::2]),
        ),
        (
            "_varlen_attn",
            "Input tensor must have contiguous last dimension",
            lambda a: {t.stride(-1) for t in (a.query, a.key, a.value)} != {1},
            lambda: attend(of(bfloat16, 32, 16, 2).mT),
        ),
        (
            "_varlen_attn_backward",
            "dout tensor must have contiguous last dimension",
            lambda a: a.grad_out.stride(-1) != 1,
            lambda: attend(of(bfloat16, 32, 2, 16).requires_grad_()).backward(
                of(bfloat16, 32, 16, 2).mT
            ),
        ),
        (
            "_varlen_attn",
            WIDE_READS,
            lambda a: any(misaligned(t, *t.stride()[:2]) for t in (a.query, a.key, a.value)),
            lambda: attend(v=of(bfloat16, 32, 2, 20)[:, :, :16]),
        ),
        # Rows by index: TensorAdvancedIndexing.cpp, Loss.cu
        (
            "index_add index_copy",
            "self and source expected to have the same dtype",
            lambda a: mixed(a.self, a.source),
            lambda: of(float32, 4).index_add(0, of(int64, 4), of(bfloat16, 4)),
        ),
        (
            "index_copy",
            "index_copy_(): Expected a long tensor for index",
            lambda a: a.index.dtype != int64,
            lambda: of(float32, 4).index_copy(0, of(int32, 4), of(float32, 4)),
        ),
        (
            "index_put",
            "Index put requires the source and destination dtypes match",
            lambda a: mixed(a.self, a.values),
            lambda: of(float32, 4).index_put_((of(int64, 4),), of(bfloat16, 4)),
        ),
        (
            "nll_loss_forward",
            "expected scalar type ",
            lambda a: a.target.dtype not in (int64, torch.uint8),
            lambda: F.cross_entropy(of(float32, 4, 4), of(int32, 4)),
        ),
        # Optimizers: FusedAdamWKernel.cu
        (
            "_fused_adamw",
            "params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout",
            lambda a: any(
                mixed(*row) for row in zip(a.self, a.grads, a.exp_avgs, a.exp_avg_sqs, strict=True)
            ),
            lambda: update(exp_avg=of(bfloat16, 8, 4), grad=of(float32, 8, 4)),
        ),
        (
            "_fused_adamw",
            "exp_avgs, and exp_avg_sqs must have same dtype, device, and layout",
            lambda a: any(
                p.stride() != grad.stride() for p, grad in zip(a.self, a.grads, strict=True)
            ),
            lambda: update(exp_avg=of(float32, 8, 4), grad=of(float32, 4, 8).t()),
        ),
    )
]


@cache
def dtypes_of_kernels() -> dict[str, set[torch.dtype]]:
    """Return the dtypes of each operation's CUDA kernel, by the operation's name."""
    with unset_fake_temporarily():
        from torch.testing._internal.common_methods_invocations import op_db
    found = {name: {torch.bool} for name in ("cumsum", "cumprod", "sum")}  # as int64
    for op in op_db:
        found.setdefault(op.aten_name, set()).update(op.supported_dtypes("cuda"))
    return found


def is_composite(func) -> bool:
    """Return whether an operation has no kernel and calls other operations instead. _fused_rms_norm
    has a kernel only on GPUs."""
    key = torch._C.DispatchKey
    return (
        func.namespace != "prim"
        and func.has_kernel_for_dispatch_key(key.CompositeImplicitAutograd)
        and not func.has_kernel_for_dispatch_key(key.CUDA)
    )


def is_view(func) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def refusals_of(func, operation: str, args, kwargs) -> list[str]:
    """Return the reasons why an operation's kernel would refuse these arguments."""
    names = [argument.name for argument in func._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    operands = tensors(named)
    on_host = [t for t in operands if not t.is_cuda]
    made_on = torch.device(named.get("device") or "cpu")
    if len(on_host) == len(operands) and made_on.type == "cpu":
        return []
    given = SimpleNamespace(
        **{"generator": None} | named, operation=operation, operands=operands, on_host=on_host
    )
    found = [
        row.message
        for row in REFUSALS
        if {"*", operation} & {*row.operations.split()} and row.when(given)
    ]
    known = dtypes_of_kernels().get(operation.strip("_"), ())
    if (
        known
        and operands
        and operands[0].dtype not in known
        and not is_view(func)
        and operation not in MOVES
    ):
        found.append(f"not implemented for {operands[0].dtype}")
    return found


def fills_by_mask(operation: str, args) -> bool:
    """Return whether GPU values are written where a mask is true, for which the host reads the
    value or the mask."""
    if operation not in ("index_put", "masked_fill"):
        return False
    has_mask = any(t.dtype == torch.bool for t in tensors(args[1]))
    return has_mask and any(t.is_cuda for t in tensors(args[2]))


def current_line() -> str:
    """Return the innermost running line of Spider, or the line that made a graph's operation."""
    stack = torch.fx.traceback.get_current_meta().get("stack_trace")
    if not stack:
        stack = "".join(traceback.format_stack())
    lines = [
        line.strip() for line in stack.splitlines() if f'"{ROOT}' in line and "/tests/" not in line
    ]
    return lines[-1] if lines else stack


class Watch(TorchDispatchMode):
    """Record the calls that a GPU would refuse, {(operation, line of Spider, reason): operands},
    the lines at which the host waits, and how often each operation runs. number, truth: the values
    that the host reads."""

    def __init__(self, number: int = 0):
        super().__init__()
        self.number = number
        self.truth = False
        self.read = None  # storage that the host read last
        self.refused = {}
        self.waits = []
        self.count = Counter()

    @classmethod
    def is_infra_mode(cls):  # otherwise Dynamo compiles nothing
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # torchao's FP8 tensor; its inner operations return here
        kwargs = kwargs or {}
        operation = func._schema.name.split("::")[1].removesuffix("_")
        if is_composite(func):
            # autograd decomposes the others; these come from torchao, or in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        self.count[operation] += 1
        for reason in refusals_of(func, operation, args, kwargs):
            operands = ", ".join(
                f"{list(t.shape)} {t.dtype} {t.device}" for t in tensors((args, kwargs))
            )
            self.refused.setdefault((operation, current_line(), reason), operands)
        if operation in READS:
            numbers = {torch.bool: self.truth, int32: self.number, int64: self.number}
            out = numbers.get(args[0].dtype, 1.0)
        elif operation == "nonzero":
            out = args[0].new_empty((self.number, args[0].dim()), dtype=int64)
        else:
            out = func(*args, **kwargs)
        copies = operation in COPIES and len({t.device.type for t in tensors((args, out))}) > 1
        copies = copies and not (kwargs.get("non_blocking") or args[2:] == (True,))
        if copies or operation in WAITS or fills_by_mask(operation, args):
            storage = args[0].untyped_storage()  # one wait for all values of a tensor
            if self.read is None or storage._cdata != self.read._cdata:
                self.waits.append(current_line())
            self.read = storage
        return out
