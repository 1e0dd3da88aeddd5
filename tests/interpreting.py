"""Fix Triton's interpreter: it truncates when it converts numbers, multiplies bf16 as integers, and
lacks the functions of CUDA's libdevice."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

FORMATS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def decode(bits, dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(FORMATS[dtype.scalar.name])


def convert_float(bits, source, target, rounding_mode):
    """Convert the bits of numbers from one format to another."""
    numbers = decode(bits, source).float().to(FORMATS[target.scalar.name])
    bits_of_size = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    return numbers.view(bits_of_size[numbers.itemsize]).numpy()


def dot(self, a, b, total, *_):
    product = decode(a.data, a.dtype).float() @ decode(b.data, b.dtype).float()
    return interpreter.TensorHandle(product.numpy() + total.data, total.dtype.scalar)


def patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
    """Let a one-element tensor bound a loop: Triton 3.6 fails at this with NumPy 2.4."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._convert_float = convert_float
interpreter._patch_lang_tensor = patch_tensor
interpreter.InterpreterBuilder.create_dot = dot
tl.math.mul_rn = lambda a, b: a * b  # a product that the compiler must not fuse with a sum
