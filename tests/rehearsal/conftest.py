"""Prove the GPU step without a GPU: each test runs in its own process, which loads a stand-in for
the CUDA driver before torch. This needs a CUDA build of torch and a C++ compiler, but no GPU:

    torch=2.13.0  # and 2.11.0: the ends of pyproject.toml's range
    python -m venv cuda && cuda/bin/pip install torch==$torch torchao==0.18.0 numpy loguru \
        transformers safetensors expecttest pytest filelock tile-kernels==1.0.0 \
        tilelang==0.1.9 apache-tvm-ffi==0.1.9 \
        nvidia-cuda-{nvcc,crt,cccl,runtime}==13.0.* nvidia-nvvm==13.0.*  # about 3 minutes, 5.2 GB
    cuda/bin/python -m pytest -m "rehearsal and not slow" tests/rehearsal  # 25 minutes on one core
    cuda/bin/python -m pytest -m "rehearsal and slow" tests/rehearsal      # 25 more

PyPI has the CUDA build. If pip is configured to install a CPU build (`cuda/bin/python -c "import
torch; print(torch.version.cuda)"` prints None), unset PIP_FIND_LINKS and PIP_INDEX_URL, and set
PIP_CONFIG_FILE=/dev/null.

gpu.py runs Spider's steps on fake tensors and generates their compiled code; refusals.py watches
the operations. `-rP` shows the figures of passing tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

COMPILER = os.environ.get("CXX", "g++")
BUILT = tempfile.TemporaryDirectory()


def pytest_pycollect_makemodule():
    """Skip all test modules before they import Triton."""
    if torch.version.cuda is None or shutil.which(COMPILER) is None:
        pytest.skip(
            "needs a CUDA build of torch, and g++ or the C++ compiler in CXX; see "
            "tests/rehearsal/conftest.py"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test in a child process, with its module's ENVIRONMENT; in the child, run the test as
    usual."""
    if "IN_REHEARSAL" in os.environ:
        os.environ.pop("LD_PRELOAD", None)  # not for child processes
        return None
    environment = dict(
        IN_REHEARSAL="1",
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        PYTHONWARNINGS="ignore",
        LD_PRELOAD=build_stand_in(),
    )
    environment |= getattr(pyfuncitem.module, "ENVIRONMENT", {})
    options = "-qsrs --no-header --show-capture=no -o addopts= -p no:cacheprovider".split()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", pyfuncitem.nodeid, *options],
        text=True,
        cwd=pyfuncitem.config.rootpath,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        pytest.fail(done.stdout, pytrace=False)
    if "SKIPPED" in done.stdout:
        pytest.skip(done.stdout[done.stdout.index("SKIPPED") :])
    print(done.stdout)  # pytest -rP shows the figures
    return True


@cache
def build_stand_in() -> str:
    """Compile absent_cuda.cpp (seconds); return the library's path."""
    torch_at = Path(torch.__file__).parent
    library = f"{BUILT.name}/absent_cuda.so"
    flags = (
        f"-std=c++20 -shared -fPIC -I{torch_at}/include -L{torch_at}/lib -Wl,-rpath,{torch_at}/lib "
        f"-Wl,--no-as-needed,--allow-shlib-undefined -lc10 -ltorch_cpu"
    )
    subprocess.run(
        [COMPILER, Path(__file__).with_name("absent_cuda.cpp"), "-o", library, *flags.split()],
        check=True,
    )
    return library
