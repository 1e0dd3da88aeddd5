"""Test a kernel on this device before it is used: compare its results with exact ones."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Check(NamedTuple):
    """A result of a kernel, and the exact result."""

    name: str
    result: Tensor
    exact: Tensor  # NaN where the kernel may return anything
    tolerance: float = 0.0  # norm of the difference, relative to the norm of the exact result


def find_wrong(checks: Iterable[Check]) -> str | None:
    """Describe the first result that is off by more than its tolerance, or return None. Later
    results are not computed."""
    for name, result, exact, tolerance in checks:
        exact = exact.to(result.dtype).float()
        is_free = exact.isnan()
        error = (result.float() - exact).masked_fill(is_free, 0).norm()
        size = exact.masked_fill(is_free, 0).norm()
        if not error <= tolerance * size:  # true for NaN, too
            return f"{name} is off by {float(error / size):.1%}"
    return None


def value_and_gradients(
    function: Callable[..., Tensor],
    operands: Sequence[Tensor],
    upstream: Tensor,
    *constants: Tensor,
) -> list[Tensor]:
    """Return a function's value and the gradients of its operands. upstream: the gradient of the
    value. constants: other arguments."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    value = function(*leaves, *constants)
    return [value.detach(), *torch.autograd.grad(value, leaves, upstream)]


def first_error(fault: Exception) -> str:
    """Describe an error in one line: the first line that reports one, else the first line.
    Compilers print the source before their errors."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    for line in lines:
        if re.search(r"(error|fatal)\s*: *\S", line):
            first = line
            break
    return f"{type(fault).__name__}: {first[:200]}".removesuffix(": ")
