"""Measure Spider on this machine: peak rates, an optimizer step, the backends of the experts.

    python bench.py --first_hour results  # on a new GPU: tests, runs, all sections
    python bench.py --only machine  # GPU, versions, compiler and headers
    python bench.py --device cpu --micro_batch 4 # all sections; takes train.py's flags

The batch is by default the one to train with: on a GPU 448 sequences of 256 bytes, in as few
micro-steps as fit, on a CPU 8. The text is synthetic unless --data_dir is given. A section that
fails prints its error in one line, then the traceback, and the next one runs. Times are medians.
MFU is relative to the measured rate of bf16 products and does not count recomputation. On a CPU all
takes some ten minutes.
"""

import gc
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

from spider import common

if __name__ == "__main__":
    common.set_allocator()  # before torch is imported

import torch

import train
from data import Feed, Loader, mock_source, open_data
from spider import estimate, first_hour, machine
from spider.common import Parser, UsageError, path_name, run_program
from spider.config import BACKENDS
from spider.distributed import World
from tile_moe import moe_forward


class Bench:
    """The machine, and the flags of train.py for a step."""

    def __init__(self, flags: list[str]):
        self.world = World({})
        self.device = self.world.device = machine.resolve_device(
            train.parse_args(flags, environ={}).device
        )
        self.on_gpu = self.device.type == "cuda"
        self.has_fp8 = self.on_gpu and torch.cuda.get_device_capability() >= (8, 9)
        self.wait = torch.cuda.synchronize if self.on_gpu else lambda: None
        self.rates = {}  # bytes/s by precision and --compile, as measured
        args = train.parse_args(flags, environ={})
        self.sources = open_data(args.data_dir) if "data_dir" in args.given else [mock_source(0)]
        batch = [f"--global_batch={448 * 256}" if self.on_gpu else "--micro_batch=8"]
        if args.given & {"micro_batch", "grad_accum", "global_batch"}:
            batch = []
        # The rates keep the weights; at --lr 0 Muon would skip its products.
        self.flags = [
            "--seq_len=256",
            *batch,
            *flags,
            "--compile=off",
            "--lr=1e-20",
            "--engram_lr=0",
        ]
        # refuses bad flags, before kernels are compiled for the test of `auto`
        self.plan("--moe_backend=grouped")

    def plan(self, *flags: str) -> train.Plan:
        args = train.parse_args([*self.flags, *flags], environ={})
        args.fp8_experts = args.fp8_experts and args.precision == "fp8"
        return train.settle(args, self.world, sources=self.sources)

    def times(self, function, repetitions: int = 9, warm_up: int = 2) -> list[float]:
        """Return the sorted times of calls in ms, each until the device has finished."""
        times = []
        for _ in range(warm_up + repetitions):
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start))
        return sorted(times[warm_up:])

    def print_table(self, name: str, *rows: dict):
        keys = list(dict.fromkeys(key for row in rows for key in row))
        print(f"\n### {name}\n\n| {' | '.join(keys)} |\n|{'---|' * len(keys)}")
        for row in rows:
            values = (
                f"{row[key]:,.3f}" if isinstance(row.get(key), float) else row.get(key, "")
                for key in keys
            )
            print("|", *(f"{value} |" for value in values), flush=True)


def smi(fields: str) -> str:
    return subprocess.getoutput(f"nvidia-smi --query-gpu={fields} --format=csv,noheader")


def describe_machine(b: Bench):
    header, found = (
        os.path.join(sysconfig.get_path("include"), "Python.h"),
        {"threads": torch.get_num_threads()},
    )
    if b.on_gpu:
        found |= {
            "GPU": torch.cuda.get_device_properties(b.device),
            "driver, highest clocks": smi("driver_version,clocks.max.sm,clocks.max.mem"),
        }
    print("testing torch.compile, which may take a minute", flush=True)
    packages = "torch", "triton", "torchao", "bitsandbytes", "tile-kernels"
    found |= {
        package.name: package.version
        for package in metadata.distributions()
        if package.name in packages
    }
    found |= {
        "C++ compiler": subprocess.getoutput("g++ --version").partition("\n")[0],
        "Python's headers": header if os.path.exists(header) else "MISSING: install python3-dev",
        "torch.compile": machine.obstacle_to_compile(b.device) or "passes a test",
    }
    b.print_table("machine", *({"what": what, "value": value} for what, value in found.items()))


def ceilings(b: Bench):
    n, one = 8192 if b.on_gpu else 2048, torch.ones((), device=b.device)
    x, w = (torch.randn(n, n, device=b.device) for _ in range(2))
    x16, w16, x8, w8 = (
        x.bfloat16(),
        w.bfloat16(),
        x.to(torch.float8_e4m3fn),
        w.to(torch.float8_e4m3fn).t(),
    )
    source = torch.empty(1 << (30 if b.on_gpu else 27), dtype=torch.uint8, device=b.device)
    work = {
        "copy, read and written": (2 * len(source), source.clone),
        "product, fp32": (2 * n**3, lambda: x @ w),
    }
    if machine.multiplies_bf16(b.device):
        work["product, bf16"] = 2 * n**3, lambda: x16 @ w16
    if b.has_fp8:
        work["product, fp8"] = (
            2 * n**3,
            partial(torch._scaled_mm, x8, w8, one, one, None, None, torch.bfloat16, True),
        )
    b.print_table(
        "ceilings",
        *(
            {"what": name, "TB/s or TFLOP/s": size / median(b.times(function)) / 1e9}
            for name, (size, function) in work.items()
        ),
    )


class Step:
    """An optimizer step of a new model, on the next batch of the text at each call."""

    def __init__(self, b: Bench, plan: train.Plan):
        torch._dynamo.reset()
        self.plan = plan
        self.model = train.build_model(self.plan, b.world)
        self.optimizers = train.optimizers_of(self.plan, self.model)
        self.feed = Feed(Loader(b.sources, self.plan.seq_len, 0), self.plan, 0, b.device, 0, 0)

    def __call__(self) -> dict:
        return train.step_alone(self.model, self.optimizers, self.feed.take(), self.plan.n_loops)


def measure_step(b: Bench, *flags: str) -> float:
    """Measure a step, unless one of this precision and --compile was measured before: time, MFU,
    compilation, memory, clocks, and for how long the GPU works. Return bytes/s."""
    if "--compile=on" in flags:
        print("\ncompiling the layers, which may take minutes", flush=True)
    plan = b.plan(*flags)
    kind = plan.precision, plan.compile
    if kind in b.rates:
        return b.rates[kind]
    if b.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = Step(b, plan)
    metrics = {}
    graphs = torch._dynamo.utils.counters["stats"]
    (first,) = b.times(lambda: train.warm_up(step.model, plan, b.device), 1, 0)
    made = graphs["unique_graphs"]
    # a CPU compiles for each step's documents
    times = b.times(lambda: metrics.update(step()), 9 if b.on_gpu else 3)
    rate, length = plan.step_bytes / median(times) * 1e3, metrics["bytes_per_segment"]
    flops = rate * estimate.flops_per_byte(step.model, length, plan.n_loops, plan.seq_len)
    row = {
        "ms": median(times),
        "slowest/fastest": times[-1] / times[0],
        "bytes/s": rate,
        "bytes/segment": length,
        "MFU": flops / machine.product_rate(b.device),
        "first passes, s": first / 1e3,
        "recompilations": graphs["unique_graphs"] - made,
    }
    if b.on_gpu:
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        row |= {
            "estimated, GB": sum(plan.memory.values()) / 1e9,
            "allocated, GB": allocated / 1e9,
            "reserved, GB": reserved / 1e9,
            "reserved/allocated": reserved / allocated,
            "clocks": smi("clocks.sm,clocks.mem"),
        }
        row |= profile(b, step)
    batch = f"{plan.micro_batch} x {plan.seq_len}" + f" x {plan.grad_accum}" * (plan.grad_accum > 1)
    b.print_table(
        f"step of {batch} bytes, {plan.precision}, compile {plan.compile}, recompute "
        f"{plan.recompute}",
        row,
    )
    b.rates[kind] = rate
    return rate


def profile(b: Bench, step: Step) -> dict:
    """Profile a step; return for how long the GPU works in it, in ms, and the number of kernels and
    copies. The rest of a step's time the GPU waits for the host. Only the GPU is recorded, which
    hardly slows the host down."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            b.wait()
        with tempfile.TemporaryDirectory() as directory:
            trace = Path(directory) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            work = machine.read_trace(trace)
    except Exception as fault:  # no CUPTI, or not allowed: the step's time is worth more
        return {"the GPU works, ms": f"{fault!r:.200}"}
    return {"the GPU works, ms": work.busy, "kernels": work.kernels}


def fp8(b: Bench):
    """Measure FP8: its error beside that of bf16, and its speed, which decides what --precision
    auto should be."""
    if not b.has_fp8:
        return print("\nfp8: skipped, this machine has none")
    found = {}
    for precision in ("fp32", "bf16", "fp8"):  # on the same batch
        step = Step(
            b,
            b.plan(
                f"--precision={precision}",
                "--moe_backend=grouped",
                "--micro_batch=8",
                "--grad_accum=1",
                f"--global_batch={8 * b.plan().seq_len}",
            ),
        )
        sums, _ = train.accumulate(step.model, step.feed.take(), step.plan.n_loops)
        grads = [p.grad.flatten().cpu() for p in step.optimizers.dense if p.grad is not None]
        found[precision] = float(sums["loss"]), torch.cat(grads)
    exact, truth = found.pop("fp32")
    b.print_table(
        "error",
        *(
            {
                "precision": name,
                "loss - fp32's": loss - exact,
                "gradient, relative": float((grad - truth).norm() / truth.norm()),
            }
            for name, (loss, grad) in found.items()
        ),
    )
    del step, grads
    fast, usual = (
        measure_step(b, "--compile=on", f"--precision={name}") for name in ("fp8", "bf16")
    )
    b.print_table(
        "fp8 relative to bf16",
        {
            "bytes/s": fast / usual,
            "--precision auto should be": "fp8" if fast > 1.1 * usual else "bf16",
        },
    )


def experts(b: Bench):
    """Measure the routed experts alone, forward and backward, by backend."""
    plan, rows = b.plan(), []
    c, dtype = plan.config, torch.float32 if plan.precision == "fp32" else torch.bfloat16
    if not c.has_experts:
        return print("\nexperts: skipped, this model has none")
    n = int(plan.micro_batch * plan.seq_len / c.bytes_per_segment)
    d, e, f = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    x, *weights = (
        torch.randn(shape, device=b.device, dtype=dtype, requires_grad=True)
        for shape in ((n, d), (e, d, 2 * f), (e, f, d))
    )
    share, choice = torch.rand(n, e, device=b.device).softmax(-1).topk(c.n_experts_per_tok)
    for backend in BACKENDS:
        rows.append({"backend": backend, "tokens": n})
        try:
            rows[-1]["ms"] = median(
                b.times(
                    lambda backend=backend: (
                        moe_forward(x, choice, share, *weights, backend).sum().backward()
                    )
                )
            )
        except Exception as fault:  # another backend may work
            rows[-1]["error"] = f"{fault!r:.200}"
            b.wait()  # raises if the GPU is unusable
    b.print_table("experts", *rows)


SECTIONS = dict(
    machine=describe_machine,
    ceilings=ceilings,
    eager=lambda b: measure_step(b, "--compile=off"),
    compiled=lambda b: measure_step(b, "--compile=on"),
    fp8=fp8,
    experts=experts,
)


def run(argv: list[str] | None) -> int:
    """Run sections; return 1 if one fails. After a device assert nothing works in a process: then
    stop."""
    parser = Parser(prog="bench.py", description=__doc__)
    parser.add_argument(
        "--only", metavar="NAME,...", help=f"sections to run: {', '.join(SECTIONS)}"
    )
    parser.add_argument(
        "--first_hour",
        type=path_name,
        metavar="DIR",
        help="run everything that a GPU can show, in the order that finds most in the first "
        "minutes; "
        "results are in DIR; the same command again runs what has not passed yet. --only: items to "
        "run, also if they passed; --data_dir: text instead of the repository's own; --device "
        "cpu: a "
        "small form, which tests the commands",
    )
    args, flags = parser.parse_known_args(argv)
    if args.first_hour:
        environ = {
            name: value
            for name, value in os.environ.items()
            if name.lower() not in train.ENVIRONMENT
        }
        return first_hour.run(Path(args.first_hour), args.only, flags, environ)
    names, status = args.only.split(",") if args.only else [*SECTIONS], 0
    if unknown := {*names} - SECTIONS.keys():
        raise UsageError(f"--only: {', '.join(sorted(unknown))}: not among {', '.join(SECTIONS)}")
    machine.start_log("WARNING")
    machine.keep_freed_memory()
    b = Bench(flags)
    for name in names:
        print(f"\n## {name}", flush=True)
        try:
            SECTIONS[name](b)
        except Exception as fault:
            status = 1
            print(f"\n{name}: FAILED: {fault!r:.200}\n{traceback.format_exc()}", flush=True)
        gc.collect()  # what a failed section held
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
    sys.exit(main())
