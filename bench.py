"""Measure Spider on this machine: peak rates, an optimizer step, the backends of the experts.

    python bench.py --only machine        # GPU, versions, compiler and headers
    python bench.py --device cpu --micro_batch 4  # all sections; takes train.py's flags

The batch is by default the one to train with: on a GPU 448 sequences of 256 bytes, in as few
micro-steps as fit, on a CPU 8. The text is synthetic unless --data_dir is given.

Times are medians. MFU is relative to the measured rate of bf16 products and does not count
recomputation. A section that fails prints its error in one line and the traceback; then the next
one runs. On a CPU all take some ten minutes.
"""

from spider.common import start_script

if __name__ == "__main__":
    start_script("bench.py")  # before torch is imported

import gc
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import train
from data import Feed, Loader, mock_source, open_data
from spider import estimate, machine
from spider.common import UsageError, run_program
from spider.config import BACKENDS
from spider.distributed import World
from spider.plan import Plan, settle
from tile_moe import moe_forward


class Bench:
    """The machine, and the flags of train.py for a step."""

    def __init__(self, flags: list[str]):
        command = train.parse_args(flags, environ={})
        self.device = machine.resolve_device(command.flags.device)
        self.world = World({}, self.device)
        self.on_gpu = self.device.type == "cuda"
        self.has_fp8 = self.on_gpu and machine.has_fp8(self.device)
        # bytes/s, as measured, by precision and --compile
        self.rates: dict[tuple[str, str], float] = {}
        self.sources = [mock_source(0)]
        if "data_dir" in command.given:
            self.sources = open_data(command.flags.data_dir)
        batch = []
        if not command.given & {"micro_batch", "grad_accum", "global_batch"}:
            batch = [f"--global_batch={448 * 256}" if self.on_gpu else "--micro_batch=8"]
        # The rates keep the weights; at --lr 0 Muon would skip its products.
        rates = ["--lr=1e-20", "--engram_lr=0"]
        self.flags = ["--seq_len=256", *batch, *flags, "--compile=off", *rates]
        # refuses bad flags, before kernels are compiled for the test of `auto`
        self.plan("--moe_backend=grouped")

    def wait(self):
        """Wait until the device has finished. Raise an error if it is unusable."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def plan(self, *flags: str) -> Plan:
        """Settle the plan of a step, with these flags after the others."""
        command = train.parse_args([*self.flags, *flags], environ={})
        if command.flags.precision != "fp8":
            command = command._replace(flags=replace(command.flags, fp8_experts=False))
        return settle(command, train.RECIPES, self.world, sources=self.sources)

    def times(
        self, function: Callable[[], object], repetitions: int = 9, warm_up: int = 2
    ) -> list[float]:
        """Return the sorted times of calls in ms, each until the device has finished."""
        times = []
        for _ in range(warm_up + repetitions):
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start))
        return sorted(times[warm_up:])


def print_table(name: str, rows: list[dict]):
    """Print rows as a table of Markdown; a row may lack some of the columns."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    print(f"\n### {name}\n")
    print(f"| {' | '.join(columns)} |")
    print(f"|{'---|' * len(columns)}")
    for row in rows:
        cells = []
        for column in columns:
            value = row.get(column, "")
            cells.append(f"{value:,.3f}" if isinstance(value, float) else str(value))
        print(f"| {' | '.join(cells)} |", flush=True)


# --------------------------------------------------------------------------------------------------
# Sections


def nvidia_smi(fields: str) -> str:
    return subprocess.getoutput(f"nvidia-smi --query-gpu={fields} --format=csv,noheader")


def describe_machine(b: Bench):
    """Print the hardware, versions, and what torch.compile needs."""
    found: dict[str, object] = {"threads": torch.get_num_threads()}
    if b.on_gpu:
        found["GPU"] = torch.cuda.get_device_properties(b.device)
        found["driver, highest clocks"] = nvidia_smi("driver_version,clocks.max.sm,clocks.max.mem")
    named = ("torch", "triton", "torchao", "bitsandbytes", "tile-kernels")
    for package in metadata.distributions():
        if package.name in named:
            found[package.name] = package.version
    found["C++ compiler"] = subprocess.getoutput("g++ --version").partition("\n")[0]
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        header = "MISSING: install python3-dev"
    found["Python's headers"] = header
    print("testing torch.compile, which may take a minute", flush=True)
    found["torch.compile"] = machine.obstacle_to_compile(b.device) or "passes a test"
    print_table("machine", [{"what": what, "value": value} for what, value in found.items()])


def measure_ceilings(b: Bench):
    """Measure the peak rates: of a copy, and of square products."""
    n_bytes = 1 << (30 if b.on_gpu else 27)
    source = torch.empty(n_bytes, dtype=torch.uint8, device=b.device)
    rows = [ceiling(b, "copy, read and written", 2 * n_bytes, source.clone)]

    n = 8192 if b.on_gpu else 2048
    x = torch.randn(n, n, device=b.device)
    w = torch.randn(n, n, device=b.device)
    flops = 2 * n**3
    rows.append(ceiling(b, "product, fp32", flops, lambda: x @ w))
    if machine.multiplies_bf16(b.device):
        x16 = x.bfloat16()
        w16 = w.bfloat16()
        rows.append(ceiling(b, "product, bf16", flops, lambda: x16 @ w16))
    if b.has_fp8:
        x8 = x.to(torch.float8_e4m3fn)
        w8 = w.to(torch.float8_e4m3fn).t()  # column-major, as the product needs it
        one = torch.ones((), device=b.device)
        multiply = partial(
            torch._scaled_mm, x8, w8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        rows.append(ceiling(b, "product, fp8", flops, multiply))
    print_table("ceilings", rows)


def ceiling(b: Bench, name: str, work: float, function: Callable[[], object]) -> dict:
    """Measure the rate of a function. work: its bytes or FLOPs."""
    return {"what": name, "TB/s or TFLOP/s": work / median(b.times(function)) / 1e9}


class Step:
    """An optimizer step of a new model, on the next batch of the text at each call."""

    def __init__(self, b: Bench, plan: Plan):
        torch._dynamo.reset()
        self.plan = plan
        self.model = train.build_model(plan.model, plan, b.world)
        self.optimizers = train.optimizers_of(plan.flags, self.model)
        loader = Loader(b.sources, plan.flags.seq_len, 0)
        self.feed = Feed(loader, plan.layout, 0, b.device, 0, 0)
        self.now = train.StepSettings(plan.flags.n_loops)

    def __call__(self) -> dict:
        """Take a step; return its metrics."""
        metrics, _ = train.train_step(self.model, self.optimizers, self.feed.take(), self.now)
        return metrics


def measure_step(b: Bench, *flags: str) -> float:
    """Measure a step, and print the table; return bytes/s.

    A kind of step is measured once: a second call returns the first one's rate.
    """
    if "--compile=on" in flags:
        print("\ncompiling the layers, which may take minutes", flush=True)
    plan = b.plan(*flags)
    kind = (plan.flags.precision, plan.flags.compile)
    if kind in b.rates:
        return b.rates[kind]
    if b.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = Step(b, plan)
    graphs = torch._dynamo.utils.counters["stats"]
    (first,) = b.times(lambda: train.warm_up(step.model, plan, b.device), 1, warm_up=0)
    graphs_before = graphs["unique_graphs"]
    metrics = []
    # a CPU compiles for each step's documents
    times = b.times(lambda: metrics.append(step()), 9 if b.on_gpu else 3)
    rate = plan.step_bytes / median(times) * 1e3
    length = metrics[-1]["bytes_per_segment"]
    flops = rate * estimate.flops_per_byte(
        step.model, length, plan.flags.n_loops, plan.flags.seq_len
    )
    row = {
        "ms": median(times),
        "slowest/fastest": times[-1] / times[0],
        "bytes/s": rate,
        "bytes/segment": length,
        "MFU": flops / machine.product_rate(b.device),
        "first passes, s": first / 1e3,
        "recompilations": graphs["unique_graphs"] - graphs_before,
    }
    if b.on_gpu:
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        row |= {
            "estimated, GB": sum(plan.memory.values()) / 1e9,
            "allocated, GB": allocated / 1e9,
            "reserved, GB": reserved / 1e9,
            "reserved/allocated": reserved / allocated,
            "clocks": nvidia_smi("clocks.sm,clocks.mem"),
        }
        row |= profile(b, step)
    batch = f"{plan.flags.micro_batch} x {plan.flags.seq_len}"
    if plan.flags.grad_accum > 1:
        batch += f" x {plan.flags.grad_accum}"
    title = f"step of {batch} bytes, {plan.flags.precision}, compile {plan.flags.compile}"
    print_table(f"{title}, recompute {plan.flags.recompute}", [row])
    b.rates[kind] = rate
    return rate


def profile(b: Bench, step: Callable[[], object]) -> dict:
    """Profile a step; return for how long the GPU works in it, in ms, and the number of kernels and
    copies.

    In the rest of a step's time the GPU waits for the host. Only the GPU is recorded, which hardly
    slows the host down.
    """
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            b.wait()
        with tempfile.TemporaryDirectory() as directory:
            trace = Path(directory) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            busy, kernels = machine.read_trace(trace)
    except Exception as fault:  # no CUPTI, or not allowed: the step's time is worth more
        return {"the GPU works, ms": f"{fault!r:.200}"}
    return {"the GPU works, ms": busy, "kernels": kernels}


def gradient_of(b: Bench, precision: str) -> tuple[float, Tensor]:
    """Return the loss of a batch and the gradient of all dense parameters, of the same batch and
    weights for any precision."""
    plan = b.plan(
        f"--precision={precision}",
        "--moe_backend=grouped",
        "--micro_batch=8",
        "--grad_accum=1",
        f"--global_batch={8 * b.plan().flags.seq_len}",
    )
    step = Step(b, plan)
    sums = train.accumulate(step.model, step.feed.take(), step.now).terms
    grads = [p.grad.flatten().cpu() for p in step.optimizers.dense if p.grad is not None]
    return float(sums["loss"]), torch.cat(grads)


def measure_fp8(b: Bench):
    """Measure the error of FP8 beside that of bf16, and its speed, which decides what --precision
    auto should be."""
    if not b.has_fp8:
        print("\nfp8: skipped, this machine has none")
        return
    exact_loss, exact = gradient_of(b, "fp32")
    rows = []
    for precision in ("bf16", "fp8"):
        loss, rounded = gradient_of(b, precision)
        error = (rounded - exact).norm() / exact.norm()
        rows.append(
            {
                "precision": precision,
                "loss - fp32's": loss - exact_loss,
                "gradient, relative": float(error),
            }
        )
    print_table("error", rows)
    fp8 = measure_step(b, "--compile=on", "--precision=fp8")
    bf16 = measure_step(b, "--compile=on", "--precision=bf16")
    choice = "fp8" if fp8 > 1.1 * bf16 else "bf16"
    row = {"bytes/s": fp8 / bf16, "--precision auto should be": choice}
    print_table("fp8 relative to bf16", [row])


def measure_experts(b: Bench):
    """Measure the routed experts alone, forward and backward, by backend."""
    plan = b.plan()
    c = plan.config
    if not c.has_experts:
        print("\nexperts: skipped, this model has none")
        return
    tokens = int(plan.flags.micro_batch * plan.flags.seq_len / c.bytes_per_segment)
    dtype = torch.float32 if plan.flags.precision == "fp32" else torch.bfloat16

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=b.device, dtype=dtype, requires_grad=True)

    x_ND = draw(tokens, c.hidden_size)
    w_gate_up_EDG = draw(c.n_routed_experts, c.hidden_size, 2 * c.moe_intermediate_size)
    w_down_EFD = draw(c.n_routed_experts, c.moe_intermediate_size, c.hidden_size)
    score_NE = torch.rand(tokens, c.n_routed_experts, device=b.device)
    weights_NK, topk_idx_NK = score_NE.softmax(-1).topk(c.n_experts_per_tok)

    def pass_through(backend: str):
        y_ND = moe_forward(x_ND, topk_idx_NK, weights_NK, w_gate_up_EDG, w_down_EFD, backend)
        y_ND.sum().backward()

    rows = []
    for backend in BACKENDS:
        row = {"backend": backend, "tokens": tokens}
        rows.append(row)
        try:
            row["ms"] = median(b.times(partial(pass_through, backend)))
        except Exception as fault:  # another backend may work
            row["error"] = f"{fault!r:.200}"
            b.wait()  # raises if the GPU is unusable
    print_table("experts", rows)


SECTIONS: dict[str, Callable[[Bench], object]] = {
    "machine": describe_machine,
    "ceilings": measure_ceilings,
    "eager": lambda b: measure_step(b, "--compile=off"),
    "compiled": lambda b: measure_step(b, "--compile=on"),
    "fp8": measure_fp8,
    "experts": measure_experts,
}


# --------------------------------------------------------------------------------------------------
# The command


def run(argv: list[str] | None) -> int:
    """Run sections; return 1 if one fails.

    After a device assert nothing works in a process: then stop.
    """
    parser = train.flag_parser("bench.py", __doc__)
    parser.add_argument(
        "--only", metavar="NAME,...", help=f"sections to run: {', '.join(SECTIONS)}"
    )
    given = vars(parser.parse_args(argv))
    only = given.pop("only", None)
    flags = [f"--{name}={value}" for name, value in given.items()]
    names = only.split(",") if only else list(SECTIONS)
    unknown = sorted(set(names) - SECTIONS.keys())
    if unknown:
        raise UsageError(f"--only: {', '.join(unknown)}: not among {', '.join(SECTIONS)}")
    machine.start_log("WARNING")
    machine.keep_freed_memory()
    b = Bench(flags)
    status = 0
    for name in names:
        print(f"\n## {name}", flush=True)
        try:
            SECTIONS[name](b)
        except Exception as fault:
            status = 1
            print(f"\n{name}: FAILED: {fault!r:.200}\n{traceback.format_exc()}", flush=True)
        gc.collect()  # tensors of a failed section
        try:
            b.wait()
        except Exception:
            print(
                "the GPU is unusable after this error: run the other sections in a new process "
                "(--only)"
            )
            break
    return status


def main(argv: list[str] | None = None) -> int:
    """Run bench.py. Exit status: 0; 1 if a section failed; 2 with one line on stderr for a bad
    flag."""
    return run_program(partial(run, argv), "bench.py")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
