"""The GPU resources that a compiled Triton kernel uses."""

import os
import subprocess
import tempfile

import triton

CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")


def resources(kernel) -> str:
    """Return a kernel's registers, stack and memory, as NVIDIA's cuobjdump prints them."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)


def spills(kernel) -> bool:
    """Return whether a kernel spills registers to memory."""
    usage = resources(kernel)
    return "STACK:0 " not in usage or "LOCAL:0 " not in usage
