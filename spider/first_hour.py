"""The first hour on a GPU: what nobody has run on one yet, in the order that finds most in the
first minutes.

`python bench.py --first_hour DIR` runs the items of `plan_items` in turn, each in processes of its
own, with a time limit. The directory has

    summary.md       a table of all items, with machine and versions
    results.jsonl    the same, a line each time an item ran
    ITEM/log.txt     what its commands printed; beside it metrics.jsonl of its runs, traces, texts

Models and other large files are deleted after each item. The same command again runs the items that
have not passed on this machine with these versions. This process never touches the GPU, so no item
can spoil it for the next one.
"""

import gzip
import importlib.util
import json
import math
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

from spider.common import ROOT, Parser, UsageError, durable, locked, one_line, path_name
from spider.machine import read_trace

# --------------------------------------------------------------------------------------------------
# One item

HEARTBEAT = 30.0  # seconds after which the last line of a log is printed
KEPT = (".txt", ".json", ".jsonl", ".gz", ".png")  # suffixes of files that stay after an item
MARK = "SPIDER_FIRST_HOUR"  # environment variable of all processes of an item
RESULTS = "results.jsonl"
FAILED = "FAILED"


class Failed(Exception):
    """An item that failed, and why, in one line."""


class Skipped(Exception):
    """An item that cannot run here, and why, in one line."""


@dataclass(frozen=True)
class Machine:
    """What the items run on."""

    device: str  # cuda or cpu
    name: str
    gpus: int
    versions: str
    has_fp8: bool = True  # a CPU emulates it

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


class Trial:
    """A run of an item: its directory, its processes, and the figures that it found."""

    def __init__(
        self,
        directory: Path,
        limit: float,
        machine: Machine,
        environ: Mapping[str, str],
        data_dir: str | None = None,
    ):
        self.directory = directory
        self.log = directory / "log.txt"
        self.limit = limit
        self.deadline = time.monotonic() + limit
        self.machine = machine
        self.environ = {
            **environ,
            MARK: str(directory),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        self.data_dir = data_dir
        self.device = ("--device", machine.device)
        self.commands: list[str] = []
        self.started: list[subprocess.Popen] = []
        self.figures: dict[str, object] = {}  # for the summary, by name

    def start(self, *command: object, **environ: str) -> subprocess.Popen:
        """Start a command in the project's directory; what it prints goes to the log."""
        words = [str(word) for word in command]
        self.commands.append(one_line(shlex.join(words)))
        with self.log.open("a") as log:
            log.write(f"$ {self.commands[-1]}\n")
            log.flush()
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=self.environ | environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def wait(self, process: subprocess.Popen) -> int:
        """Wait until a process ends; return its exit status. Raise Failed at the time limit."""
        self.wait_until(process, lambda: False)
        return process.returncode

    def wait_until(self, process: subprocess.Popen, condition: Callable[[], bool]):
        """Wait until a condition holds or a process ends.

        Raise Failed at the time limit. Then the log ends with the stack of each process.
        """
        start = time.monotonic()
        shown = start  # when a line was printed last
        while process.poll() is None and not condition():
            now = time.monotonic()
            if now > self.deadline:
                self.signal_all(signal.SIGABRT)  # faulthandler prints the stacks
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                raise Failed(
                    f"not done after {self.limit:.0f} s: log.txt ends with the stack of each "
                    f"process"
                )
            if now > shown + HEARTBEAT:
                shown = now
                line = last_line(self.log.read_text(errors="replace"))
                print(f"    {now - start:.0f} s: {line:.90}", flush=True)
            time.sleep(0.05)

    def run(self, *command: object, check: bool = True, **environ: str) -> tuple[int, str]:
        """Run a command to its end; return its exit status and what it printed.

        Raise Failed for a status that is not 0, unless `check` is false.
        """
        before = self.log.stat().st_size if self.log.exists() else 0
        status = self.wait(self.start(*command, **environ))
        output = self.log.read_bytes()[before:].decode(errors="replace")
        if status and check:
            raise Failed(f"exit status {status}: {reason_of(output)}")
        return status, output

    def python(self, *arguments: object, **options) -> tuple[int, str]:
        """Run Python."""
        return self.run(sys.executable, *arguments, **options)

    def train(self, name: str, *flags: object) -> list[dict]:
        """Run train.py in a new directory; return the metrics of its steps.

        Raise Failed if a loss or gradient was not finite.
        """
        self.python("train.py", *flags, "--ckpt_dir", self.directory / name)
        lines = read_jsonl(self.directory / name / "metrics.jsonl")
        for line in lines:
            if line["skipped"] or not math.isfinite(line["loss"]):
                raise Failed(f"loss or gradient is not finite in step {line['step']}")
        return lines

    def signal_all(self, number: signal.Signals):
        """Send a signal to all processes of this item, also those whose parent has ended."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self):
        """Kill what still runs of this item, and wait until its memory is free."""
        deadline = time.monotonic() + 30  # a process that hangs in the driver cannot be killed
        while self.processes() and time.monotonic() < deadline:
            self.signal_all(signal.SIGKILL)
            time.sleep(0.02)
        for process in self.started:
            process.poll()

    def processes(self, *environ: str) -> list[int]:
        """Return the ids of this item's processes, of those with these settings (NAME=value) in
        their environment."""
        wanted = {setting.encode() for setting in (f"{MARK}={self.directory}", *environ)}
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                settings = set(path.read_bytes().split(b"\0"))
                if wanted <= settings:
                    pids.append(int(path.parent.name))
        return pids


def read_jsonl(path: Path) -> list[dict]:
    """Return the objects of a .jsonl file, without a last line that is not complete; none if there
    is no file."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_line(text: str, pattern: str = r"\S") -> str:
    """Return the last line of a text in which a pattern occurs, or an empty one."""
    for line in reversed(text.splitlines()):
        if re.search(pattern, line):
            return one_line(line.strip())
    return ""


def reason_of(output: str) -> str:
    """Return the line of an output that says best why a command failed."""
    for pattern in ("FAILED", r"[Ee]rror\b"):
        line = last_line(output, pattern)
        if line:
            return f"{line:.300}"
    return f"{last_line(output):.300}"


def read_tables(output: str) -> dict[str, list[dict[str, str]]]:
    """Return the rows of the tables that bench.py printed, by the table's name."""
    tables: dict[str, list[dict[str, str]]] = {}
    for part in output.split("\n### ")[1:]:
        name, _, header, _, *lines = part.split("\n")
        columns = [cell.strip() for cell in header.strip("| ").split("|")]
        tables[name] = []
        for line in lines:
            if not line.startswith("| "):
                break
            cells = [cell.strip() for cell in line[1:-1].split("|")]
            tables[name].append(dict(zip(columns, cells, strict=True)))
    return tables


# --------------------------------------------------------------------------------------------------
# What the items do

# 1b at sizes at which a CPU takes seconds
SMALL_SIZES = (
    "hidden_size=32,n_prelude_layers=1,n_recurrent_layers=1,n_coda_layers=1,n_heads=2,"
    "q_lora_rank=16,kv_lora_rank=16,qk_nope_head_dim=16,qk_rope_head_dim=16,v_head_dim=32,"
    "intermediate_size=32,n_routed_experts=2,moe_intermediate_size=16,"
    "engram_layers=0,engram_dim=16,engram_rows=300,engram_byte_dim=16,engram_byte_rows=300"
)
SMALL = (
    "--model=1b",
    "--n_loops=2",
    "--seq_len=64",
    "--micro_batch=2",
    "--eval_tokens=1024",
    f"--set={SMALL_SIZES}",
)
COMPILED_IS_EAGER = 0.03  # largest relative difference of a loss, as in tests/test_compile.py
# Nats by which the losses of 300 steps of `tiny` on a GPU in bf16 may differ from those on the CPU
# in fp32. Not the largest of all steps is bounded, since one with a spike differs by up to 1.2.
FIRST_STEPS = 0.0015  # the most in the first six steps, before differences grow
SHIFT = 0.002  # in the median
SPREAD = 0.006  # in the median, without the sign
# Measured on a CPU, from two starts (docs/results/performance.jsonl):
#
#     bf16                                                    0.0004   0.0004   0.0030
#     attention whose output is zero for the last 100 rows    0.0027   0.0006   0.0035
#     attention whose output projections never learn          0.0114   0.0082   0.0085


def model_of(trial: Trial) -> tuple[str, ...]:
    """Return the flags of the model and the batch of short runs."""
    return ("--model=1b", "--seq_len=256") if trial.machine.on_gpu else SMALL


def inspect_machine(trial: Trial):
    """Describe the machine; fail where torch.compile does not work."""
    _, output = trial.python("bench.py", "--only=machine", *trial.device)
    found = {row["what"]: row["value"] for row in read_tables(output)["machine"]}
    trial.figures["torch.compile"] = found["torch.compile"]
    if found["torch.compile"] != "passes a test":
        raise Failed(found["torch.compile"])


def run_tests(trial: Trial, path: Path):
    """Run the tests of a file that need CUDA."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped('pytest is not installed: pip install -e ".[test]"')
    _, output = trial.python(
        "-m", "pytest", "-q", "-m", "gpu", "-rs", "--basetemp", trial.directory / "files", path
    )
    if not re.search(r"\d+ passed", output):
        reason = re.search(r"^SKIPPED.*?: (.*)$", output, re.MULTILINE)
        raise Skipped(reason[1] if reason else "no test ran")
    trial.figures["tests"] = last_line(output)


def train_briefly(trial: Trial, *flags: str):
    """Train three steps, evaluate, sample, save. The losses must be those of the eager run, if
    there was one."""
    if "--precision=fp8" in flags and not trial.machine.has_fp8:
        raise Skipped("this GPU has no FP8")
    schedule = "--mock_data --max_steps=3 --eval_every=2 --sample_every=3".split()
    lines = trial.train("run", *model_of(trial), *schedule, *flags, *trial.device)
    last = lines[-1]
    trial.figures |= {
        "loss": last["loss"],
        "val_loss": last["val_loss"],
        "bytes/s": last["tok_per_sec"],
        "allocated, GB": last["memory"],
    }
    eager = read_jsonl(trial.directory.parent / "eager" / "run" / "metrics.jsonl")
    if trial.directory.name == "eager" or len(eager) != len(lines):
        return
    difference = max(
        abs(line["loss"] / other["loss"] - 1) for line, other in zip(lines, eager, strict=True)
    )
    trial.figures["loss/eager's - 1, at most"] = difference
    if difference > COMPILED_IS_EAGER:
        raise Failed(f"a loss is {difference:.1%} from that of the eager run")


def check_memory_accesses(trial: Trial):
    """Train a step of `tiny` under compute-sanitizer.

    Each tensor is an allocation of its own: in the caching allocator's segments an access beyond a
    tensor would be one of its neighbour.
    """
    search = f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    sanitizer = shutil.which("compute-sanitizer", path=search)
    if sanitizer is None:
        raise Skipped("compute-sanitizer, which comes with the CUDA toolkit, is not installed")
    checks = "--tool=memcheck --report-api-errors=no --error-exitcode=9".split()
    step = (
        "train.py --model=tiny --mock_data --seq_len=256 --micro_batch=4 --max_steps=1 "
        "--eval_every=0 --compile=off"
    ).split()
    status, output = trial.run(
        sanitizer,
        *checks,
        sys.executable,
        *step,
        *trial.device,
        "--ckpt_dir",
        trial.directory / "run",
        check=False,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    trial.figures["memcheck"] = last_line(output, "ERROR SUMMARY").strip("= ")
    if status:
        invalid = last_line(output, r"Invalid __\w+__") or reason_of(output)
        raise Failed(f"exit status {status}: {invalid}")


def prepare_text(trial: Trial) -> Path | str:
    """Return a directory of shards: --data_dir, or the project's own text."""
    if trial.data_dir:
        return trial.data_dir
    names = (
        "README.md docs spider tests train.py data.py sample.py spider_model.py tile_moe.py"
    ).split()
    inputs = [ROOT / name for name in names if (ROOT / name).exists()]
    trial.python("data.py", "prepare", *inputs, "--ext=.py,.md", "--out", trial.directory / "data")
    return trial.directory / "data"


def compare_with_cpu(trial: Trial):
    """Train `tiny` on real text from the same weights on the GPU in bf16 and on the CPU in fp32;
    compare each loss."""
    on_gpu = trial.machine.on_gpu
    steps = 300 if on_gpu else 8
    seq_len = 4096 if on_gpu else 256
    flags: list[object] = [
        "--model=tiny",
        "--data_dir",
        prepare_text(trial),
        f"--seq_len={seq_len}",
        "--micro_batch=1",
        f"--target_tokens={steps * seq_len}",
        "--eval_every=0",
        "--dropout=0",
        "--no-engram_reset",
    ]
    if not on_gpu:
        flags.append("--set=engram_rows=1000,engram_byte_rows=1000")
    trial.train("start", *flags, "--device=cpu", "--precision=fp32", "--max_steps=1")
    # from a file, since GPUs draw other weights from a seed
    flags += ["--resume", trial.directory / "start", "--reset_steps"]
    here = trial.train("device", *flags, *trial.device, "--compile=off")
    there = trial.train("cpu", *flags, "--device=cpu", "--precision=fp32")
    differences = [line["loss"] - other["loss"] for line, other in zip(here, there, strict=False)]
    first = max(map(abs, differences[:6]))
    shift = median(differences)
    spread = median(map(abs, differences))
    trial.figures |= {
        "steps": len(differences),
        "loss": here[-1]["loss"],
        "bytes/s": here[-1]["tok_per_sec"],
        "difference from the CPU's, first six steps": first,
        "... median": shift,
        "... median without its sign": spread,
        "... largest": max(differences, key=abs),
    }
    if len(differences) < steps:
        raise Failed(f"{len(differences)} steps of {steps}")
    if on_gpu and (first > FIRST_STEPS or abs(shift) > SHIFT or spread > SPREAD):
        raise Failed(
            f"the losses differ from the CPU's by {first:.4f} in the first six steps, {shift:.4f} "
            f"in the median, {spread:.4f} without its sign: more than rounding ({FIRST_STEPS}, "
            f"{SHIFT}, {SPREAD})"
        )


def use_checkpoint(trial: Trial):
    """Train a step; let sample.py write, evaluate and export."""
    step = "--mock_data --max_steps=1 --eval_every=0 --compile=off".split()
    trial.train("run", *model_of(trial), *step, *trial.device)
    run = trial.directory / "run"
    export = trial.directory / "export"
    text = trial.directory / "text.txt"
    length = 20_000 if trial.machine.on_gpu else 500
    text.write_bytes((ROOT / "train.py").read_bytes()[:length])
    writing = ("--prompt=def ", "--bytes=100", *trial.device)
    trial.python("sample.py", run, *writing)
    scores = trial.directory / "eval.json"
    trial.python("sample.py", run, "--eval", text, "--json", scores, *trial.device)
    trial.figures["bits per byte after a step"] = json.loads(scores.read_text())[0]["bits_per_byte"]
    if importlib.util.find_spec("safetensors") is None:
        trial.figures["export"] = "skipped: safetensors is not installed"
        return
    trial.python("sample.py", run, "--export", export)
    trial.python("sample.py", export, *writing)


# columns of bench.py's tables that the summary has
COLUMNS = (
    "ms",
    "bytes/s",
    "MFU",
    "TB/s or TFLOP/s",
    "estimated, GB",
    "allocated, GB",
    "reserved, GB",
    "the GPU works, ms",
    "kernels",
    "gradient, relative",
    "--precision auto should be",
    "error",
)


def measure(trial: Trial, sections: str, *flags: object):
    """Measure by bench.py. A section that fails does not hide the figures of the others."""
    status, output = trial.python(
        "bench.py", f"--only={sections}", *flags, *trial.device, check=False
    )
    for table, rows in read_tables(output).items():
        for row in rows:
            what = row.get("what") or row.get("backend") or row.get("precision")
            name = f"{table}: {what}" if what else table
            cells = [f"{column} {row[column]}" for column in COLUMNS if row.get(column)]
            trial.figures[name] = ", ".join(cells)
    if status:
        raise Failed(f"exit status {status}: {reason_of(output)}")


def measure_short_documents(trial: Trial):
    """Measure a step of the default batch, filled with lines of about 50 bytes as documents."""
    text = trial.directory / "lines.jsonl"
    with text.open("w") as file:
        for folder in (ROOT, ROOT / "spider", ROOT / "tests"):
            for path in folder.glob("*.py"):
                for line in path.read_text().splitlines():
                    if 30 <= len(line) <= 70:
                        file.write(f"{json.dumps({'text': line})}\n")
    trial.python("data.py", "prepare", text, "--out", trial.directory / "data")
    measure(trial, "eager", *batch_of_recipe(trial), "--data_dir", trial.directory / "data")


def batch_of_recipe(trial: Trial) -> tuple[str, ...]:
    """Return the flags of the default batch, 64 x 2,048, in as few micro-steps as fit."""
    return ("--seq_len=2048", f"--global_batch={64 * 2048}") if trial.machine.on_gpu else SMALL


def trace_steps(trial: Trial):
    """Keep a profiler's trace of compiled steps, compressed; a CPU does not compile."""
    steps = "--mock_data --max_steps=6 --eval_every=0 --profile".split()
    compiled = "--compile=on" if trial.machine.on_gpu else "--compile=off"
    trial.train("run", *model_of(trial), *steps, compiled, *trial.device)
    trace = trial.directory / "run" / "trace.json"
    work = read_trace(trace)
    if trial.machine.on_gpu and not work.kernels:
        raise Failed(
            "the profiler saw no kernel: CUPTI does not work here, so bench.py shows none either"
        )
    trial.figures |= {
        "the GPU works, share of three steps": work.busy / max(1e-9, work.span),
        "kernels and copies": work.kernels,
    }
    with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    trace.unlink()


def kill_a_rank(trial: Trial):
    """Train on two ranks with sharded weights, kill one after a checkpoint, and resume."""
    if trial.machine.on_gpu and trial.machine.gpus < 2:
        raise Skipped("there is one GPU")
    run = trial.directory / "run"
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    flags = "--shards=2 --mock_data --eval_every=0 --ckpt_every=3 --compile=off".split()
    command = (
        sys.executable,
        *torchrun,
        "train.py",
        *model_of(trial),
        *flags,
        *trial.device,
        "--ckpt_dir",
        run,
    )
    job = trial.start(*command, "--max_steps=1000000")
    trial.wait_until(job, lambda: any(run.glob("spider-step*.pt")))
    if job.returncode is not None:
        reason = reason_of(trial.log.read_text(errors="replace"))
        raise Failed(f"exit status {job.returncode}: {reason}")
    rank = min(trial.processes("LOCAL_RANK=1"))  # the others are what the rank has started
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    if trial.wait(job) == 0:
        raise Failed("torchrun ended with status 0 after one of its ranks had been killed")
    trial.figures["seconds until the other rank had ended"] = time.monotonic() - killed
    before = read_jsonl(run / "metrics.jsonl")[-1]["step"]
    last = before + 3
    _, output = trial.run(*command, f"--max_steps={last}")
    lines = read_jsonl(run / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    if "resuming from" not in output or steps != list(range(1, last + 1)):
        raise Failed(f"the same command did not resume and train to step {last}")
    trial.figures |= {
        "steps before and after": f"{before}, {last}",
        "loss": lines[-1]["loss"],
        "bytes/s": lines[-1]["tok_per_sec"],
    }


# --------------------------------------------------------------------------------------------------
# All items


@dataclass(frozen=True)
class Item:
    """What to run, and for how long at most."""

    name: str
    what: str  # for the terminal and the summary
    limit: float  # seconds
    work: Callable[[Trial], None]
    needs_gpu: bool = False


FIRST_TESTS = ("tile_moe", "grouped_triton", "tile_kernels", "compile")  # kernels


def items_of_tests() -> dict[str, Item]:
    """Return an item for each file with tests that need CUDA, by name (without test_), those of
    FIRST_TESTS first."""
    paths = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        if "mark.gpu\n" in path.read_text():
            paths[path.stem.removeprefix("test_")] = path
    names = [name for name in FIRST_TESTS if name in paths]
    names += [name for name in paths if name not in FIRST_TESTS]
    items = {}
    for name in names:
        work = partial(run_tests, path=paths[name])
        what = f"tests of {paths[name].name} that need CUDA"
        items[name] = Item(f"test_{name}", what, 600, work, needs_gpu=True)
    return items


def plan_items(on_gpu: bool) -> list[Item]:
    """Return all items in order. A CPU does not compile: that takes it minutes."""
    compiled = "--compile=on" if on_gpu else "--compile=off"
    sections = "compiled,fp8" if on_gpu else "eager,fp8"
    sizes = () if on_gpu else SMALL
    tests = items_of_tests()
    kernels = [item for name, item in tests.items() if name in FIRST_TESTS]
    others = [item for name, item in tests.items() if name not in FIRST_TESTS]
    return [
        Item(
            "machine",
            "GPU, versions, a test of torch.compile (up to a minute)",
            300,
            inspect_machine,
        ),
        *kernels,
        Item(
            "eager",
            "three steps of 1b, an evaluation, a sample, a checkpoint",
            300,
            lambda trial: train_briefly(trial, "--compile=off"),
        ),
        Item(
            "compiled",
            "the same compiled (minutes before the first step)",
            900,
            lambda trial: train_briefly(trial, compiled),
        ),
        Item(
            "compiled_fp8",
            "the same compiled in FP8 (minutes before the first step)",
            900,
            lambda trial: train_briefly(trial, compiled, "--precision=fp8"),
        ),
        Item(
            "memcheck",
            "a step of tiny under compute-sanitizer",
            600,
            check_memory_accesses,
            needs_gpu=True,
        ),
        Item(
            "text",
            "300 steps of tiny on real text, the losses beside those of the CPU",
            900,
            compare_with_cpu,
        ),
        Item("sample", "sample.py, --eval and --export of a checkpoint of 1b", 600, use_checkpoint),
        Item(
            "short_documents",
            "an eager step of 1b on documents of 50 bytes",
            300,
            measure_short_documents,
        ),
        *others,
        Item(
            "two_gpus",
            "two ranks with --shards 2, one of them killed, and resumed",
            600,
            kill_a_rank,
        ),
        Item("trace", "a profiler's trace of compiled steps of 1b", 600, trace_steps),
        Item(
            "ceilings",
            "rates of copies and products",
            300,
            lambda trial: measure(trial, "ceilings"),
        ),
        Item(
            "step",
            "a compiled step of 448 x 256 bytes in bf16 and in FP8",
            1500,
            lambda trial: measure(trial, sections, *sizes),
        ),
        Item(
            "step_2048",
            "a compiled step of 64 x 2,048 bytes in bf16 and in FP8",
            1500,
            lambda trial: measure(trial, sections, *batch_of_recipe(trial)),
        ),
        Item(
            "step_eager",
            "an eager step of 448 x 256 bytes",
            300,
            lambda trial: measure(trial, "eager", *sizes),
        ),
        Item(
            "experts",
            "the routed experts by backend",
            300,
            lambda trial: measure(trial, "experts", *sizes),
        ),
    ]


# --------------------------------------------------------------------------------------------------
# The machine

# In a process of its own, so that a GPU that no process can use ends that one alone
PROBE = """
import json, sys, torch
names = []
has_fp8 = True
for i in range(torch.cuda.device_count() if sys.argv[1] == "cuda" else 0):
    x = torch.ones(8, device=f"cuda:{i}")
    assert float((x + x).sum()) == 16
    names.append(torch.cuda.get_device_name(i))
    has_fp8 &= torch.cuda.get_device_capability(i) >= (8, 9)
print(json.dumps([torch.version.cuda, has_fp8, *names]))
"""
PACKAGES = ("torch", "triton", "torchao", "tile-kernels")


def probe(device: str, environ: Mapping[str, str]) -> Machine:
    """Find out what the items will run on, and whether a GPU computes. Raise UsageError if not."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, device],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        raise UsageError("the GPU does not answer within two minutes; look at nvidia-smi") from None
    if done.returncode:
        raise UsageError(f"the GPU is unusable: {reason_of(done.stderr)}")
    cuda, has_fp8, *gpus = json.loads(done.stdout.splitlines()[-1])
    if device == "cuda" and not gpus:
        raise UsageError(
            "no CUDA device is visible; --device cpu runs a small form, which tests the commands"
        )
    installed = {package.name.lower(): package.version for package in metadata.distributions()}
    versions = [f"Python {platform.python_version()}", f"CUDA {cuda}"]
    versions += [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    name = f"{platform.machine()}, {os.cpu_count()} cores"
    if gpus:
        name = ", ".join(gpus)
    return Machine(device, name, len(gpus), ", ".join(versions), has_fp8)


def commit() -> str:
    """Return the project's commit, with + after it if files have changed since."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


# --------------------------------------------------------------------------------------------------
# The hour


def run(
    directory: Path,
    only: str | None,
    flags: list[str],
    environ: Mapping[str, str],
    items: list[Item] | None = None,
) -> int:
    """Run the items that have not passed, or those that `only` names (NAME,...). Return 0, or 1 if
    one has failed.

    Raise UsageError for a bad flag, a directory of something else, or a GPU that is unusable at the
    start.
    """
    parser = Parser(prog="bench.py --first_hour DIR")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--data_dir", type=path_name)
    args = parser.parse_args(flags)
    if items is None:
        items = plan_items(args.device == "cuda")
    known = [item.name for item in items]
    names = only.split(",") if only else []
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UsageError(f"--only: {', '.join(unknown)}: not among {', '.join(known)}")
    directory = directory.resolve()
    if directory.exists() and any(directory.iterdir()) and not (directory / RESULTS).exists():
        raise UsageError(f"{directory} holds other files: name a new directory")
    machine = probe(args.device, environ)
    directory.mkdir(parents=True, exist_ok=True)
    forbid_core_dumps()
    data_dir = os.path.abspath(args.data_dir) if args.data_dir else None
    hour = Hour(directory, machine, environ, data_dir, items, commit())
    with locked(directory), exiting_on(signal.SIGTERM, signal.SIGHUP):
        return hour.run(names)


def forbid_core_dumps():
    """Let no process of an item leave a core dump, which may be as large as its memory."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))


@contextmanager
def exiting_on(*numbers: signal.Signals) -> Iterator[None]:
    """Let signals end this process like Ctrl-C, so that it ends those of an item.

    A signal that is ignored stays so.
    """

    def exit_by_signal(number: int, _frame: object):
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, exit_by_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Hour:
    """All items on one machine, and the directory of their results."""

    directory: Path
    machine: Machine
    environ: Mapping[str, str]
    data_dir: str | None
    items: list[Item]
    commit: str

    def run(self, names: list[str]) -> int:
        """Run the items with these names, or all that have not passed here; return the exit status.

        Stop early only if no process can use the GPU any more.
        """
        latest = self.latest_records()
        due = self.due_items(names, latest)
        minutes = sum(item.limit for item in due) / 60
        print(
            f"{self.title()}\n{len(due)} of {len(self.items)} items to run, at most {minutes:.0f} "
            f"minutes in all; results in {self.directory}",
            flush=True,
        )
        for number, item in enumerate(due, 1):
            print(
                f"[{number}/{len(due)}] {item.name}: {item.what}; at most {item.limit / 60:.0f} "
                f"min",
                flush=True,
            )
            record = self.perform(item)
            print(
                f"    {record['status']} after {record['seconds']:.0f} s: {describe(record)}",
                flush=True,
            )
            latest[item.name] = record
            with (self.directory / RESULTS).open("a") as file:
                file.write(f"{json.dumps(record)}\n")
            self.write_summary(latest)
            if record["status"] == FAILED and self.machine.on_gpu:
                try:
                    probe(self.machine.device, self.environ)
                except UsageError as fault:
                    print(
                        f"stopped: {fault}; once a new process can use it, the same command runs "
                        f"the rest"
                    )
                    break
        if due:
            print((self.directory / "summary.md").read_text(), flush=True)
        else:
            print("all items have passed", flush=True)
        return int(any(record["status"] == FAILED for record in latest.values()))

    def latest_records(self) -> dict[str, dict]:
        """Return the last record of each item on this machine with these versions."""
        results = self.directory / RESULTS
        results.touch()
        here = (self.machine.name, self.machine.versions)
        return {
            record["item"]: record
            for record in read_jsonl(results)
            if (record["machine"], record["versions"]) == here
        }

    def due_items(self, names: list[str], latest: Mapping[str, dict]) -> list[Item]:
        """Return the items with these names; without names, those that have not passed."""
        if names:
            return [item for item in self.items if item.name in names]
        passed = {name for name, record in latest.items() if record["status"] == "passed"}
        return [item for item in self.items if item.name not in passed]

    def perform(self, item: Item) -> dict:
        """Run an item in a new directory, and end all its processes; return its record."""
        directory = self.directory / item.name
        trial = Trial(directory, item.limit, self.machine, self.environ, self.data_dir)
        trial.end()  # processes that a killed first hour has left
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        start = time.monotonic()
        status = "passed"
        reason = ""
        try:
            if item.needs_gpu and not self.machine.on_gpu:
                raise Skipped("needs CUDA")
            item.work(trial)
        except Skipped as why:
            status = "skipped"
            reason = str(why)
        except Failed as why:
            status = FAILED
            reason = str(why)
        except Exception as fault:  # a file or a table is not as this module expects
            status = FAILED
            reason = f"{fault!r:.300}"
        finally:
            trial.end()
            for path in directory.rglob("*"):
                if path.is_file() and path.suffix not in KEPT:
                    path.unlink()
        return {
            "item": item.name,
            "status": status,
            "seconds": round(time.monotonic() - start, 1),
            "reason": reason,
            "figures": trial.figures,
            "commands": trial.commands,
            "machine": self.machine.name,
            "versions": self.machine.versions,
            "commit": self.commit,
            "time": time.time(),
        }

    def title(self) -> str:
        return f"{self.machine.name}; {self.machine.versions}; commit {self.commit}"

    def write_summary(self, latest: Mapping[str, dict]):
        """Write the table of all items, from the last record of each."""
        lines = [
            "# The first hour on a card",
            "",
            self.title(),
            "",
            "| item | what | status | seconds | figures |",
            "|---|---|---|---|---|",
        ]
        for item in self.items:
            record = latest.get(item.name)
            result = ("not run", "", "")
            if record is not None:
                result = (record["status"], f"{record['seconds']:.0f}", describe(record))
            cells = [cell.replace("|", "\\|") for cell in (item.name, item.what, *result)]
            lines.append(f"| {' | '.join(cells)} |")
        with durable(self.directory / "summary.md") as file:
            file.write("\n".join(lines) + "\n")


def describe(record: Mapping) -> str:
    """Describe what an item found, in one line."""
    parts = []
    if record["reason"]:
        parts.append(record["reason"])
    for name, value in record["figures"].items():
        if isinstance(value, float):
            value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        parts.append(f"{name}: {value}")
    return one_line("; ".join(parts))
