"""Measure this machine: its hardware and versions, its peak rates, and an optimizer step of Spider.

    python bench.py --only machine               # GPU, versions, torch.compile, peak rates
    python bench.py --device cpu --micro_batch 4 # the same and a step; takes train.py's flags

The default batch is the one to train with: sequences of 256 bytes, 448 of them on a GPU, in as few
micro-steps as fit; 8 on a CPU. The text is synthetic unless you give --data_dir, or a --text that a
run has prepared. To compare settings, run a step with each: --precision fp8, --moe_backend triton.

Times are medians. MFU is relative to the measured rate of bf16 matrix products and does not count
recomputation.
"""

from spider.threads import start_script

if __name__ == "__main__":
    start_script("bench.py")  # before torch is imported

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

import torch

import train
from data import Loader, Prefetcher, Source, mock_source, open_data
from spider import machine
from spider.errors import raise_on_signals, run_command
from spider.training import estimate, resolve
from spider.training.distributed import World
from spider.training.plan import Plan


def synchronize(device: torch.device):
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_calls(
    function: Callable[[], object], device: torch.device, repetitions: int = 9
) -> list[float]:
    """Return the sorted times of calls in ms, each until the device has finished. Before them, make
    two calls as a warm-up."""
    times = []
    for _ in range(2 + repetitions):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[2:])


def print_table(title: str, rows: dict[str, object]):
    """Print names and values as a Markdown table."""
    print(f"\n### {title}\n\n| | |\n|---|---|")
    for name, value in rows.items():
        if isinstance(value, float):
            value = f"{value:,.3f}"
        print(f"| {name} | {value} |")
    sys.stdout.flush()


def nvidia_smi(fields: str) -> str:
    return subprocess.getoutput(f"nvidia-smi --query-gpu={fields} --format=csv,noheader")


# --------------------------------------------------------------------------------------------------
# The machine


def describe_machine(device: torch.device):
    """Print hardware, versions, whether torch.compile works, and the peak rates of a copy and of
    square matrix products."""
    on_gpu = device.type == "cuda"
    rows: dict[str, object] = {"threads": torch.get_num_threads()}
    if on_gpu:
        rows["GPU"] = torch.cuda.get_device_properties(device)
        rows["driver, maximum clocks"] = nvidia_smi("driver_version,clocks.max.sm,clocks.max.mem")
    for package in metadata.distributions():
        if package.name in ("torch", "triton", "torchao", "bitsandbytes", "tile-kernels"):
            rows[package.name] = package.version
    print("testing torch.compile, which may take a minute", flush=True)
    rows["torch.compile"] = machine.obstacle_to_compile(device) or "passes a test"

    n_bytes = 1 << 30
    n = 8192
    if not on_gpu:
        n_bytes = 1 << 27
        n = 2048
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    ms = median(time_calls(source.clone, device))
    rows["copy (reading and writing), TB/s"] = 2 * n_bytes / ms / 1e9

    x = torch.randn(n, n, device=device)
    products = {"fp32": partial(torch.mm, x, x)}
    if machine.has_bf16(device):
        x16 = x.bfloat16()
        products["bf16"] = partial(torch.mm, x16, x16)
    if on_gpu and machine.has_fp8(device):
        x8 = x.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        products["fp8"] = partial(
            torch._scaled_mm,
            x8,
            x8.t(),  # column-major, as _scaled_mm requires
            one,
            one,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    for precision, product in products.items():
        ms = median(time_calls(product, device))
        rows[f"product, {precision}, TFLOP/s"] = 2 * n**3 / ms / 1e9
    print_table("machine", rows)


# --------------------------------------------------------------------------------------------------
# A step


def resolve_step(flags: list[str], world: World) -> tuple[Plan, list[Source]]:
    """Resolve the plan of a step from train.py's flags; return the plan and the data."""
    given = train.parse_args(flags, environ={}).given
    defaults = ["--seq_len=256"]
    if not given & {"micro_batch", "grad_accum", "global_batch"}:
        if world.device.type == "cuda":
            defaults.append(f"--global_batch={448 * 256}")
        else:
            defaults.append("--micro_batch=8")
    # Rates that leave the weights unchanged; at --lr 0, Muon would skip its matrix products
    rates = ["--lr=1e-20", "--engram_lr=0"]
    command = train.parse_args([*defaults, *flags, *rates], environ={})
    sources = [mock_source(0)]
    if given & {"data_dir", "text"}:
        sources = open_data(command.flags.data_dir)
    return resolve.resolve_plan(command, train.RECIPES, world), sources


class Step:
    """An optimizer step of a new model; each call takes the next batch of the text."""

    def __init__(self, plan: Plan, sources: list[Source], world: World):
        self.model = train.build_model(plan.model, plan, world)
        self.optimizers = train.optimizers_of(plan.flags, self.model)
        loader = Loader(sources, plan.flags.seq_len, 0)
        self.prefetcher = Prefetcher(loader, plan.layout, 0, world.device, 0, 0)
        self.now = train.StepSettings(plan.flags.n_loops)

    def __call__(self) -> dict:
        """Take a step; return its metrics."""
        metrics, _ = train.train_step(self.model, self.optimizers, self.prefetcher.take(), self.now)
        return metrics


def measure_step(plan: Plan, sources: list[Source], world: World):
    """Measure steps and print their table."""
    flags = plan.flags
    device = world.device
    on_gpu = device.type == "cuda"
    step = Step(plan, sources, world)
    print("\nfirst passes, which may take minutes if layers are compiled", flush=True)
    start = time.perf_counter()
    train.warm_up(step.model, plan, step.prefetcher.take()[0])
    synchronize(device)
    seconds = time.perf_counter() - start

    graphs = torch._dynamo.utils.counters["stats"]
    graphs_before = graphs["unique_graphs"]
    metrics = []
    # a CPU compiles anew for each step's documents
    times = time_calls(lambda: metrics.append(step()), device, 9 if on_gpu else 3)
    rate = plan.step_bytes / median(times) * 1e3
    length = metrics[-1]["bytes_per_segment"]
    flops = estimate.flops_per_byte(step.model, length, flags.n_loops, flags.seq_len)
    rows: dict[str, object] = {
        "ms": median(times),
        "slowest/fastest": times[-1] / times[0],
        "bytes/s": rate,
        "bytes/segment": length,
        "MFU": rate * flops / machine.matmul_rate(device),
        "layers compiled": step.model.compiled,
        "first passes, s": seconds,
        "recompilations": graphs["unique_graphs"] - graphs_before,
    }
    if on_gpu:
        rows["estimated, GB"] = sum(plan.memory.values()) / 1e9
        rows["allocated, GB"] = torch.cuda.max_memory_allocated() / 1e9
        rows["reserved, GB"] = torch.cuda.max_memory_reserved() / 1e9
        rows["clocks"] = nvidia_smi("clocks.sm,clocks.mem")
        rows |= profile(step)
    batch = f"{flags.micro_batch} x {flags.seq_len} x {flags.grad_accum} bytes"
    chosen = f"{flags.precision}, {flags.moe_backend} experts, recompute {flags.recompute}"
    print_table(f"step of {batch}, {chosen}", rows)


def profile(step: Callable[[], object]) -> dict[str, object]:
    """Profile a step; return how many ms the GPU is busy, and the number of kernels and copies.

    For the rest of a step's time, the GPU waits for the host. The profiler records only the GPU,
    which hardly slows the host down.
    """
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as directory:
            trace = Path(directory) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            busy, kernels = machine.read_trace(trace)
    except Exception as fault:  # no CUPTI or no permission: keep the other figures
        return {"GPU busy, ms": f"{fault!r:.200}"}
    return {"GPU busy, ms": busy, "kernels": kernels}


# --------------------------------------------------------------------------------------------------
# The command


def measure(argv: list[str] | None):
    """Parse the flags, measure, and print the tables."""
    parser = train.flag_parser("bench.py", __doc__)
    parser.add_argument("--only", choices=("machine", "step"), help="measure only this")
    given = vars(parser.parse_args(argv))
    only = given.pop("only", None)
    flags = [f"--{name}={value}" for name, value in given.items()]
    machine.start_log("WARNING")
    machine.keep_freed_memory()
    device = machine.resolve_device(train.parse_args(flags, environ={}).flags.device)
    world = World({}, device)
    if only == "machine":
        describe_machine(device)
        return
    plan, sources = resolve_step(flags, world)  # refuses bad flags before anything is measured
    if only is None:
        describe_machine(device)
    measure_step(plan, sources, world)


def main(argv: list[str] | None = None) -> int:
    """Run bench.py. Exit status: 0, or 2 with one line on stderr for a bad flag."""
    return run_command(partial(measure, argv), "bench.py")


if __name__ == "__main__":
    raise_on_signals()
    sys.exit(main())
