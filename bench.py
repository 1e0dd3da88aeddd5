"""Measure Spider on whatever machine this is: ceilings, throughput, parts of a step.

    python bench.py                                   # everything that suits the machine, minutes on a GPU or a CPU
    python bench.py --only ceilings,backends          # some of it
    python bench.py --model tiny --only loops --set engram_byte_rows=131072

Prints Markdown tables and writes bench-DEVICE.json and bench-DEVICE.png to --out. Each measurement is a median over
repetitions; what is compared alternates in one process, since machines drift. tok_per_sec counts bytes; bf16_mfu is
the model's FLOPs (recomputation not counted) against the bf16 matrix rate measured here, `of ceiling` against that of
the precision used.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import data
import tile_moe
import train
from spider_model import PRESETS, Spider, pool_segments, unpool_segments

SECTIONS = ("ceilings", "precisions", "backends", "rates", "sequences", "loops", "parts", "segments")


class Bench:
    """The machine, the settings, and what was measured so far."""

    def __init__(self, args):
        self.args, self.device = args, train.resolve_device(args.device)
        self.gpu = self.device.type == "cuda"
        self.model = args.model or ("1b" if self.gpu else "tiny")
        self.seq_len, self.micro_batch = args.seq_len or 256, args.micro_batch or (112 if self.gpu else 8)
        checked = self.flags()
        train.model_config(checked)  # what train.py refuses is refused here, before anything is measured
        self.seq_len, self.micro_batch = checked.seq_len, checked.micro_batch
        self.precision = train.resolve_precision("auto", self.device)
        self.results, self.source = {}, data.mock_source(0)

    def flags(self, **others):
        """Values of train.py's flags, these settings and others."""
        argv = ["--model", self.model, f"--seq_len={self.seq_len}", f"--micro_batch={self.micro_batch}"]
        for name, value in others.items():
            argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        args = train.parse_args(argv + ([f"--set={self.args.set}"] if self.args.set else []), environ={})
        train.take_recipe(args, self.device)
        return args

    def wait(self):
        if self.gpu:
            torch.cuda.synchronize()

    def seconds(self, function, at_least: float = 0.3) -> float:
        """Median time of a call, after two for warming up."""
        for _ in range(2):
            function()
        times, begun = [], time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begun < at_least:
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def table(self, name: str, rows: list[dict]):
        self.results[name] = rows
        keys = list(dict.fromkeys(key for row in rows for key in row))
        print(f"\n### {name}\n\n| {' | '.join(keys)} |\n|{'---|' * len(keys)}")
        for row in rows:
            print(f"| {' | '.join(show(row.get(key)) for key in keys)} |", flush=True)


def show(value) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# The machine

def ceilings(b: Bench):
    """Matrix products and copies as large as fit: what nothing can exceed."""
    n, rows = 8192 if b.gpu else 2048, []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if dtype == torch.bfloat16 and not train.multiplies_bf16(b.device):
            continue
        x, w = (torch.randn(n, n, device=b.device).to(dtype) for _ in range(2))
        rows.append({"what": f"{name} product, {n} cubed", "rate": 2 * n ** 3 / b.seconds(lambda: x @ w) / 1e12,
                     "unit": "TFLOP/s"})
    if b.precision == "fp8":
        one = torch.ones((), device=b.device)
        x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()
        t = b.seconds(lambda: torch._scaled_mm(x8, w8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
        rows.append({"what": f"fp8 product, {n} cubed", "rate": 2 * n ** 3 / t / 1e12, "unit": "TFLOP/s"})
    source = torch.empty(1 << (30 if b.gpu else 27), dtype=torch.uint8, device=b.device)
    target = torch.empty_like(source)
    t = b.seconds(lambda: target.copy_(source))
    rows.append({"what": "copy, read and written", "rate": 2 * source.numel() / t / 1e9, "unit": "GB/s"})
    b.table("ceilings", rows)


def matrix_rate(b: Bench, precision: str) -> float:
    """Measured FLOP/s of a large product; of bf16 where the machine has it, for every other name."""
    if "ceilings" not in b.results:
        ceilings(b)
    rates = {row["what"].split()[0]: row["rate"] * 1e12 for row in b.results["ceilings"]}
    return rates.get(precision, rates.get("bf16", rates["fp32"]))


# ---------------------------------------------------------------------------------------------------------------------
# Training

def trainer(b: Bench, rate: float | None = 3.3, **flags):
    """A closure that does one optimizer step, and the model; `rate` sets the bytes per segment, None leaves them."""
    args = b.flags(**flags)
    config = train.model_config(args)
    with torch.device("meta"):
        model = Spider(config)
    precision = b.precision if args.precision == "auto" else args.precision
    backend = tile_moe.resolve_backend(args.moe_backend, b.device, config.hidden_size)
    train.make_real(model, b.device, precision, backend, args)
    if rate is not None:
        with torch.no_grad():
            model.boundary_predictor[2].weight.zero_()
            model.boundary_predictor[2].bias.fill_(30.0 if rate <= 1 else -torch.tensor(rate - 1.0).log().item())
    optimizers = train.Optimizers(model, "muon" if args.optimizer == "auto" else args.optimizer, args)
    optimizers.set_lr(0.0, 0.0)  # the boundaries stay where they were put
    loader, count = data.Loader([b.source], args.seq_len, 0), [0]

    def step():
        ids, labels, _ = loader.micro_batch(count[0] * args.micro_batch, 0, args.micro_batch)
        count[0] += 1
        batch = train.Batch.of(ids, labels, count[0] << 20).to(b.device)
        return train.update(model, optimizers, *train.accumulate(model, [batch], args.n_loops), batch.real, args)
    step.bytes = args.micro_batch * args.seq_len
    step.flops = lambda measured: model.flops_per_byte(measured, args.n_loops, args.seq_len)
    step.precision = precision
    return step, model


def compare(b: Bench, name: str, variants: list[tuple[str, dict]], rounds: int = 7):
    """Throughput of variants of the training step, in turn where memory allows (CPU), else one after the other."""
    rows, built = [], {}
    for label, flags in variants:
        if b.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            step = trainer(b, **flags)[0]
            built[label] = step, [], [step() for _ in range(3)][-1]["bytes_per_segment"]
        except torch.cuda.OutOfMemoryError:
            rows.append({"variant": label, "tok_per_sec": "out of memory"})
            continue
        if b.gpu:
            measure(b, built[label], rounds)
            rows.append(row_of(b, label, *built.pop(label)))
            del step
    for _ in range(rounds):
        for entry in built.values():
            measure(b, entry, 1)
    b.table(name, rows + [row_of(b, label, *entry) for label, entry in built.items()])


def measure(b: Bench, entry, rounds: int):
    step, times, _ = entry
    for _ in range(rounds):
        b.wait()
        start = time.perf_counter()
        step()
        b.wait()
        times.append(time.perf_counter() - start)


def row_of(b: Bench, label: str, step, times: list[float], bytes_per_segment: float) -> dict:
    rate = step.bytes / statistics.median(times)
    flops = rate * step.flops(bytes_per_segment)
    row = {"variant": label, "bytes/segment": bytes_per_segment, "tok_per_sec": rate,
           "slowest/fastest step": max(times) / min(times), "bf16_mfu": flops / matrix_rate(b, "bf16"),
           "of ceiling": flops / matrix_rate(b, step.precision)}
    if b.gpu:
        row["peak GB"] = train.peak_memory(b.device)
    return row


def precisions(b: Bench):
    names = ["fp32"] + ["bf16"] * train.multiplies_bf16(b.device) + ["fp8"] * (b.precision == "fp8")
    variants = [(name, dict(precision=name)) for name in names]
    if b.precision == "fp8":
        variants.append(("fp8, experts too", dict(precision="fp8", fp8_experts=True)))
    if b.gpu:
        variants += [(f"{names[-1]}, compiled", dict(precision=names[-1], compile=True))]
    variants.append((f"{names[-1]}, no recomputation", dict(precision=names[-1], no_gradient_checkpointing=True)))
    compare(b, "precisions", variants)


def backends(b: Bench):
    names = [name for name in tile_moe.BACKENDS if name != "tile" or tile_moe.resolve_backend(
        "auto", b.device, train.SpiderConfig.preset(b.model).hidden_size) == "tile"]
    compare(b, "backends", [(name, dict(moe_backend=name)) for name in names])
    config = train.SpiderConfig.preset(b.model)
    tokens = int(b.micro_batch * b.seq_len / 3.3)
    dtype = torch.float32 if b.precision == "fp32" else torch.bfloat16
    shapes = ((config.n_routed_experts, config.hidden_size, config.moe_intermediate_size),) * 2
    shapes += ((config.n_routed_experts, config.moe_intermediate_size, config.hidden_size),)
    weights = [torch.randn(s, device=b.device, dtype=dtype, requires_grad=True) for s in shapes]
    x = torch.randn(tokens, config.hidden_size, device=b.device, dtype=dtype, requires_grad=True)
    topk_weights, topk_idx = torch.rand(tokens, config.n_routed_experts, device=b.device).softmax(-1).topk(
        config.n_experts_per_tok)
    topk_weights.requires_grad_()
    upstream, times = torch.randn_like(x), {name: [] for name in names}
    for _ in range(9):
        for name in names:
            times[name].append(b.seconds(lambda: tile_moe.moe_forward(
                x, topk_idx, topk_weights, *weights, name).backward(upstream), at_least=0.1))
    rows = [{"backend": name, "tokens": tokens, "forward and backward, ms": statistics.median(times[name]) * 1e3}
            for name in names]
    for row in rows:
        row["times as fast as loop"] = rows[0]["forward and backward, ms"] / row["forward and backward, ms"]
    b.table("experts alone", rows)


def rates(b: Bench):
    compare(b, "bytes per segment", [(f"{rate:g} bytes", dict(rate=rate)) for rate in (1, 2, 3.3, 5)])


def sequences(b: Bench):
    total = b.micro_batch * b.seq_len
    compare(b, "sequence lengths", [(str(length), dict(seq_len=length, micro_batch=max(1, total // length)))
                                    for length in (256, 512, 1024, 2048, 4096, 8192) if length <= max(total, 256)])


def loops(b: Bench):
    compare(b, "loops", [(str(n), dict(n_loops=n)) for n in (1, 2, 4, 6, 8, 12)])


# ---------------------------------------------------------------------------------------------------------------------
# Inside a step

def parts(b: Bench):
    """Time of a step by part: the forward pass by module, synchronised around each; then backward, clip, optimizers."""
    step, model = trainer(b)
    spent, starts = {}, []

    def before(*_):
        b.wait()
        starts.append(time.perf_counter())

    def after(name):
        def hook(*_):
            b.wait()
            spent[name] = spent.get(name, 0) + time.perf_counter() - starts.pop()
        return hook
    handles = []
    for name, modules in {
            "forward: byte layers": (*model.prelude, *model.coda),
            "forward: byte-rate Engram": (model.engram_input, model.engram_output),
            "forward: core attention": [layer.attention for layer in model.core.layers],
            "forward: experts": [layer.moe for layer in model.core.layers],
            "forward: segment Engram": [layer.engram for layer in model.core.layers if layer.engram is not None],
            "forward, all": (model,)}.items():
        for module in modules:
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after(name))]
    model.gradient_checkpointing = False  # its second forward pass would be counted here
    model.update_expert_bias = timed(b, spent, "expert bias", model.update_expert_bias)
    torch.Tensor.backward, original = timed(b, spent, "backward", torch.Tensor.backward), torch.Tensor.backward
    train.Optimizers.step, optimize = timed(b, spent, "optimizers", train.Optimizers.step), train.Optimizers.step
    try:
        for _ in range(3):
            step()
        spent.clear()
        b.wait()
        start, rounds = time.perf_counter(), 10
        for _ in range(rounds):
            step()
        whole = time.perf_counter() - start
    finally:
        torch.Tensor.backward, train.Optimizers.step = original, optimize
    named = sum(seconds for name, seconds in spent.items() if name.startswith("forward:"))
    spent["forward: the rest"] = spent["forward, all"] - named
    named = sum(seconds for name, seconds in spent.items() if not name.startswith("forward:"))
    spent["the rest (data, clip, statistics)"] = whole - named
    b.table("parts", [{"part": name, "ms a step": seconds / rounds * 1e3, "share": seconds / whole}
                      for name, seconds in sorted(spent.items(), key=lambda item: -item[1])])


def timed(b: Bench, spent: dict, name: str, function):
    def wrapper(*arguments, **options):
        b.wait()
        start = time.perf_counter()
        out = function(*arguments, **options)
        b.wait()
        spent[name] = spent.get(name, 0) + time.perf_counter() - start
        return out
    return wrapper


def segments(b: Bench):
    """Pool and unpool, forward and backward, per byte over the number of bytes, beside the dense published form."""
    rows = []
    for count in (4096, 16384, 65536):
        h = torch.randn(count, 128, device=b.device, requires_grad=True)
        cut = (torch.rand(count, device=b.device) < 0.3).float().requires_grad_()
        null = torch.zeros(128, device=b.device)
        cu = torch.tensor([0, count], dtype=torch.int32, device=b.device)

        def packed():
            z, segment_cu = pool_segments(h, cut, cu)
            (h + unpool_segments(z, null, cut, cu, segment_cu)).sum().backward()

        def dense():
            before = cut.cumsum(0) - cut
            distance = torch.arange(int(cut.sum()), device=b.device) - before[:, None]
            weight = (distance.detach() == 0) * (1 - distance)
            (weight / weight.sum(0)).T.matmul(h).sum().backward()
        row = {"bytes": count, "pool and unpool, ns a byte": b.seconds(packed) / count * 1e9}
        if count <= 16384:
            row["dense pool, ns a byte"] = b.seconds(dense) / count * 1e9
        rows.append(row)
    b.table("segments", rows)


# ---------------------------------------------------------------------------------------------------------------------
# The command line

def plot(b: Bench, path: Path):
    """Throughput over sequence length, where it was measured and matplotlib is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print('no plot: pip install -e ".[bench]"', file=sys.stderr)
    points = [(int(row["variant"]), row["tok_per_sec"]) for row in b.results["sequence lengths"]
              if isinstance(row["tok_per_sec"], float)]
    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).add_subplot()
    axes.plot(*zip(*points), marker="o")
    axes.set(xscale="log", xlabel="sequence length, bytes", ylabel="training bytes/s",
             ylim=(0, 1.1 * max(rate for _, rate in points)), title=f"{b.model}, {b.precision}")
    axes.minorticks_off()
    axes.set_xticks([length for length, _ in points], [str(length) for length, _ in points])
    figure.savefig(path, dpi=120)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = train.Parser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(PRESETS), help="1b on a GPU, else tiny")
    parser.add_argument("--set", help="fields of SpiderConfig to change, as in train.py")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--seq_len", help="bytes per sequence (256)")
    parser.add_argument("--micro_batch", help="sequences per step (112 on a GPU, else 8)")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, help="directory for bench-DEVICE.json and .png")
    args = parser.parse_args(argv)
    unknown = set(args.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not among {', '.join(SECTIONS)}")
    return args


def measure_sections(args):
    """Every section that was asked for: tables on stdout, and figures in --out."""
    b = Bench(args)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    if not b.gpu:
        train.keep_freed_memory()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True,
                            cwd=Path(__file__).parent).stdout.strip()
    machine = torch.cuda.get_device_name() if b.gpu else f"{processor()}, {torch.get_num_threads()} threads"
    print(f"{machine}; torch {torch.__version__}; commit {commit}; model {b.model}, {b.precision}, micro-batch "
          f"{b.micro_batch}, sequence {b.seq_len}")
    for section in args.only.split(","):
        globals()[section](b)
    if args.out:
        about = dict(machine=machine, torch=torch.__version__, commit=commit, command=sys.argv, model=b.model)
        path = args.out / f"bench-{b.device.type}.json"
        path.write_text(json.dumps(about | b.results, indent=1) + "\n")
        if "sequence lengths" in b.results:
            plot(b, path.with_suffix(".png"))


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 2 with one line on stderr for a bad flag or file."""
    train.logger.remove()
    try:
        measure_sections(parse_args(argv))
        return 0
    except train.UsageError as fault:
        line = str(fault)
    except BrokenPipeError:               # of `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as fault:
        line = f"{fault.filename}: {fault.strerror}"
    print(f"bench.py: error: {data.one_line(line)}", file=sys.stderr)
    return 2


def processor() -> str:
    """The CPU's name and its widest instructions."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")),
                platform.processor())
    return name + next((f" with {flag}" for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
                        if f" {flag}" in info), "")


if __name__ == "__main__":
    sys.exit(main())
