"""Benchmark Spider on this machine: peak rates, throughput, breakdown of a step.

    python bench.py                                   # all sections for this machine: minutes on a GPU or a CPU
    python bench.py --only ceilings,backends          # some sections
    python bench.py --model tiny --only core --data_dir data --seq_len 4096 --micro_batch 1     # core vs. byte layers
    python bench.py --model 1b --only traffic         # several ranks, calculated: bytes sent and time
    torchrun --standalone --nproc_per_node 4 bench.py --model tiny --only traffic --device cpu       # measured
    python bench.py --rehearse h200                   # estimate a step without the GPU (spider/dev/rehearsal.py)
    python bench.py --rehearse h200 --compiled        # the same with torch.compile (spider/dev/compiled.py)

Prints Markdown tables. With --out it writes bench-DEVICE.json after every section and bench-DEVICE.png at the end, or
rehearsal-CARD.json. On a GPU the steps of --rehearse come first, and at the end the figures that exceed their estimate
by more than 1.5 times. Each figure is a median over repetitions, on a single-threaded CPU of CPU time. Variants
alternate in one process, since machines drift. tok_per_sec counts bytes. bf16_mfu is the model's FLOPs (without
recomputation) relative to the measured bf16 matrix rate, `of ceiling` relative to that of the precision used.
"""

import argparse
import itertools
import json
import math
import operator
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import torch

import tile_moe
import train
from spider.data.loader import Loader
from spider.data.shards import mock_source, open_data
from spider.dev import absent_gpu, operations, rehearsal
from spider.dev.measuring import (Meter, ceilings, copy_rate, kernels, matrix_rate, print_rows, processor, segments)
from spider.dev.traffic import Traffic, expected, paper_rows
from spider.errors import UsageError
from spider.flags import Parser, path_name, real, run_program
from spider.model import costs
from spider.model.config import BACKENDS, PRESETS, RECOMPUTE
from spider.training.batches import batches_of
from spider.training.machine import (keep_freed_memory, multiplies_bf16, peak_memory, resolve_compile, resolve_device,
                                     resolve_precision)
from spider.training.optimizers import Optimizers
from spider.training.plan import Plan
from spider.training.ranks import FIRST_STEP_TIMEOUT, World
from spider.version import commit
from spider_model import Spider


class Bench(Meter):
    """The machine, the settings, and the results so far."""

    def __init__(self, world: World, device: str = "auto", model: str | None = None, settings: str | None = None,
                 seq_len: str | None = None, micro_batch: str | None = None, data_dir: str | None = None,
                 out: Path | None = None):
        """settings: --set; seq_len, micro_batch: unparsed text. Raise UsageError for values that train.py refuses."""
        device = world.local_device(resolve_device(device))
        super().__init__(device, resolve_precision("auto", device, compiles=True)[0] == "fp8",
                         out if world.is_rank0 else None)
        self.model, self.settings, self.world = model or ("1b" if self.gpu else "tiny"), settings, world
        self.seq_len = 256 if seq_len is None else seq_len
        self.micro_batch = (112 if self.gpu else 8) if micro_batch is None else micro_batch
        plan = self.plan()
        self.config, self.precision = plan.config, plan.machine.precision
        self.seq_len, self.micro_batch = plan.batch.seq_len, plan.batch.micro_batch
        self.compiles = resolve_compile("auto", self.device)[0]
        self.sources = open_data(data_dir) if data_dir else [mock_source(0)]
        self.card = absent_gpu.card_of(torch.cuda.get_device_name()) if self.gpu else None

    def plan(self, world: World | None = None, **flags) -> Plan:
        """Settle train.py's plan for these settings and other flags, whose `set` overrides --set."""
        if self.settings:
            flags.setdefault("set", self.settings)
        common = dict(model=self.model, seq_len=self.seq_len, micro_batch=self.micro_batch, lr=0.001, compile="off")
        args = train.parse_args(flags_of(common | flags), environ={})
        return train.settle(args, self.device, World({}) if world is None else world)


def flags_of(flags: dict) -> list[str]:
    return [f"--{name}={'on' if value is True else value}" for name, value in flags.items()]


# ---------------------------------------------------------------------------------------------------------------------
# Measure the steps that --rehearse estimates


def headline(b: Bench):
    """Measure time and memory of every step in the rehearsal's table, and kernels and host time of the first one. On a
    CPU, measure only suitable steps, in a suitable precision."""
    rows = []
    for name, flags in rehearsal.SETTINGS.items():
        if flags["precision"] == "fp8" and not b.fp8 or "seq_len" in flags and not b.gpu:
            continue
        if not b.gpu:
            name, flags = name.replace("bf16", b.precision), flags | dict(precision=b.precision)
        b.start_afresh()
        try:
            step = Step(b, **flags)
            rate = step()["bytes_per_segment"]
            b.spent(step), b.spent(step)
            seconds = statistics.median(b.spent(step) for _ in range(5))
        except torch.cuda.OutOfMemoryError:
            rows.append({"step": name, "ms": "out of memory"})
            continue
        speed = step.plan.batch.bytes / seconds
        rows.append({"step": name, "ms": seconds * 1e3, "bytes/s": speed, "bytes/segment": rate,
                     "bf16_mfu": step.flops(rate) * speed / matrix_rate(b, "bf16")})
        if b.gpu:
            rows[-1]["peak GB"] = peak_memory(b.device)
        if len(rows) == 1:
            rows[0] |= {"kernels": kernels(step)} if b.gpu else {}
            rows[0]["host, ms"] = host_time(b)
        del step
        print_rows("headline", rows[-1:], head=len(rows) == 1)
        b.results["headline"] = rows
        b.keep()


def host_time(b: Bench, **flags) -> float:
    """Measure the host's milliseconds of a step (Python, dispatcher, launches): run 1b's layers and loops at minimal
    sizes, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step = Step(b, **dict(model="1b", set=rehearsal.HOST_SIZES, seq_len=16, micro_batch=2, precision="bf16",
                              recompute="core") | flags)
        for _ in range(3):                # with varying sizes, so that all graphs are compiled
            step()
        return statistics.median(b.spent(step) for _ in range(9)) * 1e3
    finally:
        torch.set_num_threads(threads)


def bounds(b: Bench, found: dict):
    """Compare the figures of `headline` with the estimates for this card; list those that miss them."""
    rows, missed = rehearsal.against_bounds(b.results["headline"], found)
    b.table("measured and rehearsed", rows)
    b.results["missed"] = missed
    if missed:
        return b.table(f"missed its bound by more than {rehearsal.MISS} times", missed)
    print(f"\nno figure missed its bound by more than {rehearsal.MISS} times")


# ---------------------------------------------------------------------------------------------------------------------
# Training


class Step:
    """An optimizer step of a new model with train.py's flags; `rate`: bytes per segment, by default the config's."""

    def __init__(self, b: Bench, rate: float | None = None, world: World | None = None, **flags):
        if flags.get("compile") == "on":
            torch._dynamo.reset()  # else graphs of earlier variants count towards dynamo's limit
        if rate is not None:              # only the rate of these boundaries can be set at once
            flags["set"] = ",".join(filter(None, (flags.get("set", b.settings), "boundaries=flexitokens")))
        self.plan = plan = b.plan(world, **flags)
        self.model = train.build_model(plan, b.device, world)
        if plan.config.boundaries == "flexitokens" and plan.config.n_recurrent_layers:
            rate = plan.config.bytes_per_segment if rate is None else rate
            with torch.no_grad():
                self.model.boundary_predictor[2].weight.zero_()
                self.model.boundary_predictor[2].bias.fill_(30.0 if rate <= 1 else -math.log(rate - 1))
        self.optimizers = Optimizers(self.model, plan.optimizer)
        self.optimizers.set_lr(1e-20, 1.0)  # keeps the weights unchanged; at 0 Muon would skip its products
        self.loader, self.steps = Loader(b.sources, plan.batch.seq_len, 0), itertools.count()
        self.world = World({}) if world is None else world
        self.world.device = b.device

    def __call__(self) -> dict:
        """Run the step; return its metrics."""
        step = next(self.steps)
        batches = list(batches_of(self.loader, self.plan.batch, 0, self.world, step, step * self.plan.batch.sequences))
        return train.step_alone(self.model, self.optimizers, batches, self.plan.n_loops, self.plan.optimizer.grad_clip)

    def flops(self, bytes_per_segment: float) -> float:
        """Count FLOPs per byte."""
        return self.model.flops_per_byte(bytes_per_segment, self.plan.n_loops, self.plan.batch.seq_len)


def compare(b: Bench, name: str, variants: list[tuple[str, dict]], rounds: int):
    """Measure variants of the training step: alternating on a CPU, one after the other on a GPU, to save memory."""
    rows, built = [], {}
    for label, flags in variants:
        b.start_afresh()
        try:
            step = Step(b, **flags)
            built[label] = step, [], [step() for _ in range(3)][-1]["bytes_per_segment"]
            if b.gpu:
                step, times, rate = built.pop(label)
                times += [b.spent(step) for _ in range(rounds)]
                rows.append(row_of(b, label, step, times, rate))
            del step
        except torch.cuda.OutOfMemoryError:
            rows.append({"variant": label, "tok_per_sec": "out of memory"})
    for _ in range(rounds):
        for step, times, _ in built.values():
            times.append(b.spent(step))
    for label, entry in built.items():    # relative to the first variant in the same round
        first = next(iter(built.values()))[1]
        rows.append(row_of(b, label, *entry) | {
            "times the first's": statistics.median(map(operator.truediv, entry[1], first))})
    b.table(name, rows)


def row_of(b: Bench, label: str, step: Step, times: list[float], bytes_per_segment: float) -> dict:
    rate = step.plan.batch.bytes / statistics.median(times)
    flops = rate * step.flops(bytes_per_segment)
    row = {"variant": label, "bytes/segment": bytes_per_segment, "tok_per_sec": rate,
           "slowest/fastest step": max(times) / min(times), "bf16_mfu": flops / matrix_rate(b, "bf16"),
           "of ceiling": flops / matrix_rate(b, step.plan.machine.precision)}
    if b.gpu:
        row["peak GB"] = peak_memory(b.device)
    return row


def precisions(b: Bench):
    names = ["fp32"] + ["bf16"] * multiplies_bf16(b.device) + ["fp8"] * b.fp8
    yield from ((name, dict(precision=name)) for name in names)
    if b.fp8 and b.config.has_experts:
        yield "fp8, experts too", dict(precision="fp8", fp8_experts=True)
    yield from ((f"{names[-1]}, recompute {what}", dict(precision=names[-1], recompute=what)) for what in RECOMPUTE)


def compiled(b: Bench):
    names = ["bf16"] + ["fp8"] * b.fp8 if b.compiles else []
    yield from ((f"{name}, compiled", dict(precision=name, compile="on")) for name in names)


def sequences(b: Bench):
    total = b.micro_batch * b.seq_len
    for length in (256, 512, 1024, 2048, 4096, 8192):
        if length <= max(total, 256):
            yield str(length), dict(seq_len=length, micro_batch=max(1, total // length))


def core(b: Bench):
    """Yield the model with the core, without it, and with more byte layers instead."""
    without = ",".join(filter(None, (b.settings, "n_recurrent_layers=0")))
    yield from (("no core", dict(set=without)), ("core", {}))
    for n in (1, 2):
        yield f"no core, {n} more byte layers", dict(set=f"{without},n_prelude_layers={b.config.n_prelude_layers + n}")


def backend_names(b: Bench) -> list[str]:
    dtype = torch.float32 if b.precision == "fp32" else torch.bfloat16
    return [name for name in BACKENDS * b.config.has_experts if name != "tile"
            or tile_moe.resolve_backend("auto", b.device, b.config, dtype) == "tile"]


# Sections that compare variants of a training step: title, rounds, and (label, train.py's flags) of each variant.
VARIANTS = {
    "precisions": ("precisions", 7, precisions),
    "backends": ("backends", 7, lambda b: ((name, dict(moe_backend=name)) for name in backend_names(b))),
    "rates": ("bytes per segment", 7, lambda b: ((f"{rate:g} bytes", dict(rate=rate)) for rate in (1, 2, 3.3, 5))),
    "sequences": ("sequence lengths", 7, sequences),
    "loops": ("loops", 7, lambda b: ((str(n), dict(n_loops=n)) for n in (1, 2, 4, 6, 8, 12))),
    "core": ("core", 15, core),
    "compiled": ("compiled", 7, compiled),
}


def measure_section(b: Bench, name: str):
    """Measure one of SECTIONS."""
    if name in VARIANTS:
        title, rounds, variants = VARIANTS[name]
        if variants := list(variants(b)):
            compare(b, title, variants, rounds)
        if name == "backends" and variants:
            experts(b)
        return
    {"ceilings": ceilings, "headline": headline, "parts": parts, "segments": segments, "decoding": decoding,
     "traffic": traffic}[name](b)


def experts(b: Bench):
    """Measure the routed experts alone, forward and backward, by backend."""
    config, names, dtype = b.config, backend_names(b), torch.float32 if b.precision == "fp32" else torch.bfloat16
    tokens = int(b.micro_batch * b.seq_len / config.bytes_per_segment)
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


# ---------------------------------------------------------------------------------------------------------------------
# Breakdown of a step


def parts(b: Bench):
    """Break down an eager step: the forward pass by module, with a synchronization around each; backward, clipping,
    optimizers."""
    step = Step(b)
    model = step.model
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
            "forward: core feed-forward": [layer.moe for layer in model.core.layers],
            "forward: segment Engram": [layer.engram for layer in model.core.layers if layer.engram is not None],
            "forward, all": (model,)}.items():
        for module in modules:
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after(name))]
    model.recompute = "nothing"           # recomputation would count as forward
    model.update_expert_bias = b.timed(spent, "expert bias", model.update_expert_bias)
    torch.Tensor.backward, original = b.timed(spent, "backward", torch.Tensor.backward), torch.Tensor.backward
    Optimizers.step, optimize = b.timed(spent, "optimizers", Optimizers.step), Optimizers.step
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
        torch.Tensor.backward, Optimizers.step = original, optimize
    named = sum(seconds for name, seconds in spent.items() if name.startswith("forward:"))
    spent["forward: the rest"] = spent["forward, all"] - named
    named = sum(seconds for name, seconds in spent.items() if not name.startswith("forward:"))
    spent["the rest (data, clip, statistics)"] = whole - named
    b.table("parts", [{"part": name, "ms a step": seconds / rounds * 1e3, "share": seconds / whole}
                      for name, seconds in sorted(spent.items(), key=lambda item: -item[1])])


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def decoding(b: Bench, rounds: int = 7, steps: int = 48, recomputed: int = 1024):
    """Measure the time per decoded byte after texts of several lengths, alternating with a full pass over 1,024 bytes,
    on a CPU in fp32. Weights are fresh, so that no segment halts early. The floor is the time to read the weights
    (chosen experts only, the core once per visit) and latents at the measured copy bandwidth."""
    rows = []
    torch.manual_seed(0)
    model = Spider(b.config).to(b.device).eval()
    model.compute_dtype = torch.bfloat16 if b.gpu and multiplies_bf16(b.device) else torch.float32
    c, size = model.config, torch.finfo(model.compute_dtype).bits // 8
    latent = size * (c.kv_lora_rank + c.qk_rope_head_dim)
    with model.cast_weights_once(), torch.no_grad():
        for n_loops in dict.fromkeys((b.plan().n_loops, 6)):
            ids, entries = torch.randint(32, 127, (1, 4096 + steps), device=b.device), []
            for written in (64, 512, 1024, 4096):
                state = model.decoding_state(n_loops=n_loops)
                model.step(ids[:, :written], state)
                entries.append((written, state, [], written / max(1, int(state.segments))))
            full = []
            for _ in range(rounds):
                full.append(b.spent(lambda: model(ids[:, :recomputed], n_loops=n_loops)))
                for written, state, times, _ in entries:
                    state = state.copy()
                    times.append(b.spent(lambda: [model.step(ids[:, written + i:written + i + 1], state)
                                                  for i in range(steps)]) / steps)
            full = statistics.median(full)
            for written, _, times, rate in entries:
                cached = latent * ((c.n_prelude_layers + c.n_coda_layers) * min(c.byte_window or written, written)
                                   + c.n_recurrent_layers * n_loops / rate * written / rate)
                floor = (size * costs.products_per_byte(model, rate, n_loops) + cached) / copy_rate(b)
                step = statistics.median(times)
                rows.append({"loops": n_loops, "bytes before": written, "bytes/segment": rate, "a byte, ms": step * 1e3,
                             "slowest/fastest": max(times) / min(times),
                             f"recomputing {recomputed:,} bytes, ms": full * 1e3, "times as fast": full / step,
                             "floor, ms": floor * 1e3, "share of floor": floor / step})
    b.table("decoding", rows)


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


def traffic(b: Bench):
    """Report the bytes that a rank sends per optimizer step: counted with several ranks, else calculated."""
    world = b.world
    if world.ranks > 1:
        layouts = [shards for shards in range(1, world.ranks + 1) if world.ranks % shards == 0]
        return b.table("traffic, counted", [counted(b, shards, grad_accum, precision) for shards in layouts
                                            for grad_accum in (1, 3) for precision in ("fp32", "bf16")[:shards]])
    with torch.device("meta"):
        model = Spider(b.config)
    b.table("traffic, on paper", paper_rows(model))


def counted(b: Bench, shards: int, grad_accum: int, precision: str) -> dict:
    """Count the bytes that this rank sends in the second of two steps, and compare them with the formula."""
    world = b.world
    world.make_mesh(shards)
    step = Step(b, None, world, grad_accum=grad_accum, precision=precision, moe_backend="grouped", optimizer="muon",
                recompute="core", shards=shards)
    with torch.device("meta"):
        whole = Spider(step.plan.config)
    whole.compute_dtype = step.model.compute_dtype
    near, far, _ = expected(whole, world.replicas, shards, grad_accum, 2 if multiplies_bf16(b.device) else 4)
    step()
    with Traffic() as counter:
        step()
    return {"replicas": world.replicas, "shards": shards, "micro-steps": grad_accum, "precision": precision,
            "collectives": counter.calls, "MB sent": counter.sent / 1e6, "by the formula": (near + far) / 1e6}


# ---------------------------------------------------------------------------------------------------------------------
# Estimates without the GPU


def rehearsed_step(card: str, flags: list[str]) -> dict:
    """Estimate a step with train.py's flags; for `absent_gpu.in_child`."""
    train.logger.remove()
    card = absent_gpu.CARDS[card]
    return rehearsal.summary(card, rehearsal.rehearse(card, flags, train))


def compiled_step(card: str, flags: list[str]) -> dict:
    """Compile a step with train.py's flags; for `absent_gpu.in_child`."""
    train.logger.remove()
    from spider.dev import compiled       # it needs Triton
    return compiled.compile_step(absent_gpu.CARDS[card], flags, train)


def rehearse(card_name: str, common: list[str], flags: str | None, compiles: bool) -> dict[str, list[dict]]:
    """Return the tables of estimates for a card, with the settings of the table or with `flags`; print each line as
    soon as it is known."""
    if reason := absent_gpu.obstacle():
        raise absent_gpu.RehearsalError(f"--rehearse: {reason}")
    card = absent_gpu.CARDS[card_name]
    print(f"{card.name}, estimated without it: {card.bf16 / 1e12:.0f} (bf16), {card.fp8 / 1e12:.0f} (FP8), "
          f"{card.fp32 / 1e12:.0f} (TF32) TFLOP/s, memory {card.bandwidth / 1e12:.2f} TB/s, {card.memory / 1e9:.0f} "
          f"GB; each kernel takes at least {operations.FLOOR * 1e6:g} us, and {operations.LAUNCH * 1e6:g} us on the "
          f"host.\n"
          f"{card.source}\ntorch {torch.__version__}; commit {commit()}", flush=True)
    if compiles:
        tables = absent_gpu.in_child(compiled_step, card_name, common + (flags or "--precision bf16").split())
        for name, rows in tables.items():
            print_rows(name, rows)
        return tables
    settings = {name: flags_of(flags) for name, flags in rehearsal.SETTINGS.items()}
    if flags is not None:
        settings = {flags: flags.split()}
    found, rows = {}, []
    for name, words in settings.items():
        found[name] = absent_gpu.in_child(rehearsed_step, card_name, common + words)
        rows.append(rehearsal.row_of(card, name, found[name]))
        print_rows("steps", rows[-1:], head=len(rows) == 1)
    details = rehearsal.details(found)
    for name, lines in details.items():
        print_rows(name, lines)
    here = Bench(World({}), "cpu", "1b")
    host = [{"Python, dispatcher and autograd of a bf16 step": label, "CPU ms here": host_time(here, **flags)}
            for label, flags in (("core recomputed", {}), ("nothing recomputed", dict(recompute="nothing")),
                                 ("nothing, compiled", dict(recompute="nothing", compile="on")))]
    print_rows("host", host)
    print(rehearsal.BLIND)
    return {"steps": rows, **details, "host": host}


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def plot(b: Bench, path: Path):
    """Plot throughput over sequence length, if matplotlib is installed."""
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


# Ordered by importance, in case the run is stopped early.
SECTIONS = ("ceilings", "headline", "parts", "precisions", "backends", "segments", "rates", "sequences", "loops",
            "core", "decoding", "traffic", "compiled")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(PRESETS), help="1b on a GPU, else tiny")
    parser.add_argument("--set", help="fields of SpiderConfig to change, as in train.py")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--seq_len", help="bytes per sequence (256)")
    parser.add_argument("--micro_batch", help="sequences per step (112 on a GPU, else 8)")
    parser.add_argument("--data_dir", type=path_name,
                        help="directory of shards for the training steps (default: synthetic sentences)")
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="SECTION,...",
                        help=f"sections to run: {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=path_name, help="directory for bench-DEVICE.json and .png")
    parser.add_argument("--rehearse", choices=tuple(absent_gpu.CARDS), help="estimate a step on this GPU, without it")
    parser.add_argument("--minutes", type=real(0),
                        help="start no further section when this time is nearly over (10 on a GPU)")
    parser.add_argument("--flags", help="with --rehearse: train.py's flags of a single step to estimate")
    parser.add_argument("--compiled", action="store_true", help="with --rehearse: compile the step by torch.compile")
    args = parser.parse_args(argv)
    args.out = args.out and Path(args.out)
    if args.flags is not None and not args.rehearse:
        parser.error("--flags needs --rehearse CARD")
    if args.compiled and not args.rehearse:
        parser.error("--compiled needs --rehearse CARD")
    if args.data_dir is not None and args.rehearse:
        parser.error("--data_dir does not apply to --rehearse, which uses synthetic sentences")
    unknown = set(args.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not among {', '.join(SECTIONS)}")
    return args


def describe(b: Bench):
    """Print machine and settings, and record them for --out."""
    machine = torch.cuda.get_device_name() if b.gpu else f"{processor()}, {torch.get_num_threads()} threads"
    print(f"{machine}; torch {torch.__version__}; commit {commit()}; model {b.model}, {b.precision}, micro-batch "
          f"{b.micro_batch}, sequence {b.seq_len}")
    b.about = dict(machine=machine, torch=torch.__version__, commit=commit(), command=sys.argv, model=b.model)


def measure_sections(b: Bench, sections: list[str], minutes: float | None):
    """Measure the given sections: print tables, and write figures to --out."""
    start, limit = time.monotonic(), 10 if minutes is None and b.gpu else minutes
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        rehearsed = rehearsed_beside(b, pool) if "headline" in sections and b.gpu else {}
        for section in sections:
            if limit is not None and time.monotonic() - start > 50 * limit:  # leaves a sixth for the bounds
                print(f"\n{section}: skipped, {limit} minutes are nearly over (--minutes)")
                continue
            measure_section(b, section)
            b.keep()
        if rehearsed:
            bounds(b, {name: one.result() for name, one in rehearsed.items()})
            b.keep()
    if b.out and "sequence lengths" in b.results:
        plot(b, b.out / f"bench-{b.device.type}.png")


def rehearsed_beside(b: Bench, pool: ThreadPoolExecutor) -> dict:
    """Start the estimates for the steps of `headline` in other processes; return {} if this card has none."""
    reason = absent_gpu.obstacle() or (None if b.card else f"{torch.cuda.get_device_name()} is not a known card")
    if reason:
        print(f"no estimates: {reason}")
        return {}
    common = [f"--model={b.model}"] + [f"--set={b.settings}"] * bool(b.settings)
    return {name: pool.submit(absent_gpu.in_child, rehearsed_step, b.card, common + flags_of(flags))
            for name, flags in rehearsal.SETTINGS.items()}


def main(argv: list[str] | None = None) -> int:
    """Run bench.py. Exit status: 0, or 2 with one line on stderr for a bad flag or file."""
    train.logger.remove()

    def run():
        args, world = parse_args(argv), World()
        if args.rehearse:
            common = {name: getattr(args, name) for name in ("model", "set", "seq_len", "micro_batch")}
            common = flags_of({name: value for name, value in common.items() if value is not None})
            tables = rehearse(args.rehearse, common, args.flags, args.compiled)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                about = dict(card=args.rehearse, torch=torch.__version__, commit=commit(), command=sys.argv)
                (args.out / f"rehearsal-{args.rehearse}.json").write_text(
                    json.dumps(about | tables, indent=1, allow_nan=False) + "\n")
            return
        if world.ranks > 1 and args.only != "traffic":
            raise UsageError("several ranks only support --only traffic: use one process for the other sections")
        with world, nullcontext() if world.is_rank0 else redirect_stdout(None):
            b = Bench(world, args.device, args.model, args.set, args.seq_len, args.micro_batch, args.data_dir, args.out)
            world.join(b.device, 1, FIRST_STEP_TIMEOUT)
            if b.out:
                args.out.mkdir(parents=True, exist_ok=True)
            if not b.gpu:
                keep_freed_memory()
            describe(b)
            measure_sections(b, args.only.split(","), args.minutes)
    return run_program(run, "bench.py")


if __name__ == "__main__":
    sys.exit(main())
