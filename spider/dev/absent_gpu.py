"""Simulate a GPU, to count, check or compile a training step without one.

`stand_in(card)` gives this process one of CARDS, with torch's fake tensors: a device, a shape and strides, but no
memory. Their backward passes need a library that is loaded before torch: `in_child` starts a process with it and calls
a function there. `settle` and `build` make the plan, model and optimizers of a step by train.py, which is passed as a
module. `absent` derives a model class with uninitialized weights; `obstacle` returns why counts would be wrong here.
"""

import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from spider.errors import SpiderError
from spider.model import packing
from spider.training.batches import Batch
from spider.training.optimizers import Optimizers
from spider.training.plan import Plan
from spider.training.ranks import World


class RehearsalError(SpiderError):
    """A step cannot be rehearsed here; the message names the remedy."""


@dataclass(frozen=True)
class Card:
    """The rates and sizes of a GPU: products in FLOP/s, memory in bytes and bytes/s."""
    name: str
    capability: tuple[int, int]
    bf16: float
    fp8: float
    fp32: float                           # in TF32, as set here
    bandwidth: float
    memory: float
    processors: int                       # streaming multiprocessors
    source: str


# Assumed fractions of published peaks are 4/5, of published bandwidths 0.83: those that an H200 reaches.
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


# Autograd needs streams and guards of a device, which come from the driver in a CUDA build. These stubs have one device
# and never wait. They are registered with precedence, after torch is loaded and before its first use.
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
    """Return why counts would be wrong here, with the remedy, or None."""
    if torch.version.cuda is None:
        return (f"torch {torch.__version__} is built without CUDA and decomposes some operations that are one kernel "
                "on a GPU; in a separate environment (no GPU needed): pip install torch==2.11.0 torchao==0.18.0 "
                "numpy loguru")
    return no_compiler()


def no_compiler() -> str | None:
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        return "there is no C++ compiler to build the stand-in for CUDA: install g++, or name one in CXX"
    return None


def build_shim() -> Path:
    """Build the stand-in for CUDA, once per version of torch (seconds); return the library's path."""
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


LEAST_FLAGS = ("--model=1b", "--seq_len=256", "--micro_batch=112", "--compile=off", "--moe_backend=grouped")


@contextmanager
def stand_in(card: Card):
    """Make torch report one GPU, `card`, so that a plan can be settled for it and `fake_tensors` created."""
    properties = SimpleNamespace(
        name=card.name, major=card.capability[0], minor=card.capability[1], multi_processor_count=card.processors,
        total_memory=int(card.memory), warp_size=32, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536, L2_cache_size=60 << 20)
    answers = {"is_available": True, "get_device_capability": card.capability, "is_bf16_supported": True,
               "get_device_name": card.name, "device_count": 1, "current_device": 0,
               "get_device_properties": properties, "is_current_stream_capturing": False}
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", lambda *_, answer=answer, **__: answer))
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None))
        yield


@contextmanager
def fake_tensors():
    """Make all tensors fake, inside `stand_in`."""
    packing.frequencies.cache_clear()     # fake tensors belong to one mode
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        packing.frequencies.cache_clear()


def absent(model_class: type[nn.Module]) -> type[nn.Module]:
    """Derive a model class whose weights are created on the GPU and never initialized."""
    class Absent(model_class):
        def __init__(self, config):
            with torch.device("cuda"):
                super().__init__(config)

        def to_empty(self, **_):
            return self

        def init_weights(self):
            pass
    return Absent


def settle(trainer: ModuleType, flags: list[str]) -> Plan:
    """Settle the plan of a step by train.py's flags, by default for 1b, inside `stand_in`."""
    args = trainer.parse_args([*LEAST_FLAGS, *flags], environ={})
    return trainer.settle(args, torch.device("cuda"), World({}))


def build(trainer: ModuleType, plan: Plan) -> tuple[nn.Module, Optimizers]:
    """Build a plan's model and optimizers like train.py, with fake tensors."""
    model = trainer.build_model(plan, torch.device("cuda"), model_class=absent(trainer.Spider))
    optimizers = Optimizers(model, plan.optimizer)
    optimizers.set_lr(plan.schedule.lr, 1.0)
    return model, optimizers


def fake_batch(plan: Plan, documents: int) -> Batch:
    """Return a micro-batch with this number of documents."""
    ids = torch.empty(plan.batch.micro_batch, plan.batch.seq_len, dtype=torch.int64, device="cuda")
    cu_seqlens = torch.empty(documents + 1, dtype=torch.int32, device="cuda")
    return Batch(ids, torch.empty_like(ids), 1 << 20, cu_seqlens, ids.numel(), ids.numel())


CHILD = """
import ctypes, json, os, runpy, sys, warnings
library, file, name, values = sys.argv[1:]
library = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # before torch, which else finds its own CUDA first
import torch
library.install()
warnings.simplefilter("ignore")
sys.path.insert(0, os.path.dirname(file))
print(json.dumps(runpy.run_path(file, run_name="in_child")[name](*json.loads(values))))
"""


def in_child(function: Callable, card: str, flags: list[str]) -> dict:
    """Call a script's function(card, flags) in a process that loads the stand-in for CUDA before torch; a real GPU is
    not used. Returns its result, passed as JSON. With a CPU build of torch shapes are checked, but counts are wrong.
    Raise RehearsalError if it fails."""
    if reason := no_compiler():
        raise RehearsalError(reason)
    command = [sys.executable, "-c", CHILD, str(build_shim()), inspect.getfile(function), function.__name__,
               json.dumps([card, flags])]
    done = subprocess.run(command, capture_output=True, text=True,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    if done.returncode:
        last = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RehearsalError(f"a step of {' '.join(flags)} fails: {last[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def card_of(name: str) -> str | None:
    """Return the key in CARDS for a GPU's name, or None."""
    return next((key for key, card in CARDS.items() if name.startswith(card.name)), None)
