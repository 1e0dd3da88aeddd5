"""Shared by all tests: a small model in which no component is zero, inputs for it, and whole runs
of small models."""

import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Set before transformers is imported: no network, nothing in the home directory.
CACHE = tempfile.TemporaryDirectory()
os.environ |= dict(
    HF_HOME=CACHE.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
)
# Set before torch is imported: threads do not help small models, and pytest workers share cores.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

import data
import sample
import train
from spider.config import SpiderConfig
from spider.model.layers import wide
from spider.model.memory import EngramTable, MatchMemory
from spider.training import curves, distributed, estimate, plan, resolve
from spider.training.checkpoint import find_checkpoints
from spider.training.run import RunProgress
from spider_model import Spider
from tile_moe import has_grouped_kernel
from tokenizer import BOS_ID, EOS_ID
from train import command_line


def pytest_collection_modifyitems(items):
    for item in items:
        # not `keywords`, which include the names of directories
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def has_fp8(experts: bool = False) -> bool:
    """Return whether the GPU has FP8 products; with `experts`, the grouped ones for
    --fp8_experts."""
    if experts:
        return has_grouped_kernel(torch.device("cuda"), torch.bfloat16)
    return torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """Let tests and their child processes receive SIGINT and SIGHUP even if pytest runs under nohup
    or in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def processes():
    """Start a server that has imported everything. jobs.py forks runs and ranks from it in a tenth
    of a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jobs", "bitsandbytes"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server has its own sys.path
        forkserver.ensure_running()
    return context


def do_nothing_slow(patch=setattr):
    """Disable curves.png and the timing of steps, because both take longer than a small run. Their
    own tests enable them again."""
    patch(curves, "draw_curves", lambda *_: None)
    patch(train, "time_steps", lambda *_: 1000.0)
    patch(estimate, "free_memory", lambda device: 1e15)  # other programs may fill the machine


@pytest.fixture(scope="session", autouse=True)
def nothing_slow():
    with pytest.MonkeyPatch.context() as patch:
        do_nothing_slow(patch.setattr)
        yield


def small_config(**changes) -> SpiderConfig:
    """Return a small config with every component."""
    sizes = dict(
        hidden_size=32,
        n_prelude_layers=1,
        n_recurrent_layers=2,
        n_coda_layers=1,
        n_loops=2,
        n_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=16,
        intermediate_size=48,
        n_routed_experts=4,
        moe_intermediate_size=16,
        lora_rank=4,
        engram_layers=(1,),
        engram_heads=2,
        engram_rows=200,
        engram_dim=8,
        engram_byte_rows=300,
        engram_byte_dim=8,
    )
    return SpiderConfig(**(sizes | changes))


def on_meta(config: SpiderConfig) -> Spider:
    """Build a model of any size without values."""
    with torch.device("meta"):
        return Spider(config)


def weights_of(model) -> dict[str, torch.Tensor]:
    """Copy the weights and buffers of a model."""
    return {key: value.clone() for key, value in model.state_dict().items()}


# Parameters that start at zero, so that their component adds nothing at first.
ZERO_AT_FIRST = "table.weight conv_weight lora_up null_segment out_proj.weight bias"


@torch.no_grad()
def awake(config: SpiderConfig, seed: int = 0, dtype=torch.float32) -> Spider:
    """Return a model in which every component has an effect and boundaries depend on the text."""
    torch.manual_seed(seed)
    model = Spider(config)
    for name, p in model.named_parameters():
        if "offset_proj" in name or name.endswith((*ZERO_AT_FIRST.split(),)):
            p.add_(torch.randn_like(p) * 0.5)
    predictor = model.boundary_predictor
    if config.boundaries == "flexitokens" and config.n_recurrent_layers:
        predictor[2].weight.normal_(std=1.0)
    if config.boundaries == "learned" and config.n_recurrent_layers:
        predictor.regression[2].weight.normal_()
        predictor.entropy.normal_()
        predictor.steps.fill_(100)
    before_head = model.engram_output
    if before_head is not None:
        if before_head.logits is not None:
            before_head.logits.weight.normal_(std=0.3)
        if before_head.votes is not None:
            before_head.votes[2].weight.normal_(std=0.3)
    for memory in (model.engram_input, before_head):
        if memory is not None and memory.followed is not None:
            memory.followed[:, : MatchMemory.NOTHING + 1].normal_(std=0.3)
    model.to(dtype)
    model.compute_dtype = dtype
    return model.train()


def world_of(device: str = "cpu") -> distributed.World:
    """Return a world of one process on a device."""
    return distributed.World({}, device)


def resolved(*argv: str, device: str = "cpu", environ=None, **settings) -> plan.Plan:
    """Return the plan that train.py makes from flags, without this machine's environment."""
    args = train.parse_args([*argv], environ=environ or {})
    return resolve.resolve_plan(args, train.RECIPES, world_of(device), **settings)


def gradients(model: Spider) -> dict:
    """Return gradients by parameter name, None if a parameter has none. A table's gradient is the
    sum over its lookups."""
    found = {name: p.grad for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, EngramTable) and has_lookups(module):
            row, grad = lookups_of(module)
            sums = torch.zeros_like(wide(module.weight))
            found[f"{name}.weight"] = sums.index_add_(0, row, grad)
    return found


def has_lookups(table: EngramTable) -> bool:
    """Return whether a table holds gradients of lookups."""
    return bool(table.lookups) or table.sums is not None


def lookups_of(table: EngramTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the looked-up rows [n] of a table, possibly repeated, and their gradients [n, dim]."""
    rows = [row for row, _ in table.lookups]
    gradients = [grad for _, grad in table.lookups]
    if table.sums is not None:
        rows.append(torch.arange(len(table.sums), device=table.sums.device))
        gradients.append(table.sums)
    return torch.cat(rows), torch.cat(gradients)


def text(count: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random printable bytes [count, length]."""
    return torch.randint(32, 127, (count, length), generator=torch.Generator().manual_seed(seed))


def documents(*lengths: int, seed: int = 0) -> torch.Tensor:
    """Return one sequence [1, sum(lengths)] of documents BOS ... EOS of these lengths."""
    ids = text(1, sum(lengths), seed)
    start = 0
    for length in lengths:
        ids[0, start] = BOS_ID
        ids[0, start + length - 1] = EOS_ID
        start += length
    return ids


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def prepare(*args) -> int:
    """Run `data.py prepare` in this process; return its exit status."""
    return data.main(["prepare", *map(str, args)])


def code_blocks(page: str) -> list[str]:
    """Return the Python code blocks of a page of docs/."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def run_python(code: str, *words, cwd=ROOT, **environ) -> subprocess.CompletedProcess:
    """Run Python code in a new process that can import the project."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=600,
        env=os.environ | dict(PYTHONPATH=str(ROOT)) | environ,
    )


MEASURED = """
import atexit, re
atexit.register(lambda: print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]))
"""


def measured(code: str, *argv) -> tuple[subprocess.CompletedProcess, int]:
    """Run Python code in a new process; return the process and its peak memory in kB. getrusage
    would include the peak of this process."""
    done = run_python(MEASURED + code, *argv)
    return done, int(done.stdout.split()[-1])


# Values of --set
SMALL = ",".join(
    """
    hidden_size=32 n_prelude_layers=1 n_recurrent_layers=1 n_coda_layers=1 n_heads=2 q_lora_rank=16
    kv_lora_rank=16 qk_nope_head_dim=8 qk_rope_head_dim=8 v_head_dim=16 intermediate_size=48
    n_routed_experts=4 moe_intermediate_size=16 lora_rank=2 engram_layers=0 engram_heads=1
    engram_rows=200 engram_dim=8 engram_byte_rows=300 engram_byte_dim=8 boundaries=flexitokens
    boundary_prior=0.15 boundary_alpha=0.16666666666666666 boundary_sigma=0.0115 segment_offsets=1
    core_loss_weight=0
    """.split()
)


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """Run the test in its own empty directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path / "data")


def make_shards(directory):
    """Make a directory with documents: 640 bytes for training, 300 for validation."""
    directory.mkdir()
    generator = np.random.default_rng(0)
    for name, count in (("train-0.bin", 640), ("val-0.bin", 300)):
        ids = generator.choice(np.frombuffer(b"abcdef gh", np.uint8), count).astype("<u2")
        ids[::211] = BOS_ID
        ids[210::211] = EOS_ID
        ids.tofile(directory / name)
    return directory


# --------------------------------------------------------------------------------------------------
# Runs

STOPPED = 128 + signal.SIGTERM  # exit status of a run that SIGTERM stopped


def run_flags(shards, directory, *flags, steps=6) -> list[str]:
    """Return the command line of a run of a small model. `flags` are strings of one or more words,
    or paths; they override the flags here."""
    argv = f"""
        --seq_len 32 --micro_batch 2 --max_steps {steps} --ckpt_every 100 --set {SMALL} --n_loops 2
        --lr 0.01 --eval_every 4 --log_every 1 --device cpu
    """.split()
    argv += ["--data_dir", str(shards), "--ckpt_dir", str(directory)]
    for flag in flags:
        argv += flag.split() if isinstance(flag, str) else [str(flag)]
    return argv


def run(tmp_path, shards, *flags, steps=6, ckpt="run", status=0, model=Spider):
    """Run a small model; check the exit status; return the checkpoint directory."""
    directory = tmp_path / ckpt
    argv = run_flags(shards, directory, *flags, steps=steps)
    assert command_line(argv, model) == status
    return directory


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """Return the directory of a run with a checkpoint of each of its three steps. No test may
    change it."""
    root = tmp_path_factory.mktemp("trained")
    return run(root, make_shards(root / "data"), "--ckpt_every 1 --keep_last 3", steps=3)


@pytest.fixture
def run_on(processes, tmp_path):
    """Run command lines in turn on several ranks; check that all ranks exit with this status;
    return the log."""
    from jobs import Job  # jobs imports this file

    def run_on(ranks, *argvs, status=0, **options) -> str:
        statuses, log = Job(processes, tmp_path, ranks, *argvs, **options).end()
        assert statuses == [status] * ranks, log
        return log

    return run_on


def model_with_fault(number: int, fault: Callable[[Spider], None]) -> type[Spider]:
    """Return a model class that calls `fault` before training pass `number`, from 1."""
    passes = itertools.count(1)

    class Faulty(Spider):
        def forward(self, *args, **options):
            if self.training and next(passes) == number:
                fault(self)
            return super().forward(*args, **options)

    return Faulty


@contextmanager
def signal_in_step(number: int) -> Iterator[None]:
    """Send SIGTERM to this process before the update of step `number`, from 1."""
    update = train.update
    steps = itertools.count(1)

    def update_signalled(*args):
        if next(steps) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update", update_signalled)
        yield


@pytest.fixture
def train_small(tmp_path, shards):
    """Return `run` with the test's own directory and data."""
    return partial(run, tmp_path, shards)


@pytest.fixture
def train_in_parts(train_small):
    """Like `train_small`, but SIGTERM stops the run in each step of `cuts`, and the same command
    resumes it."""

    def train_in_parts(*flags, steps, cuts, ckpt="parts"):
        done = 0
        for cut in cuts:
            with signal_in_step(cut - done):
                directory = train_small(*flags, steps=steps, ckpt=ckpt, status=STOPPED)
            assert last_step(directory) == cut
            done = cut
        return train_small(*flags, steps=steps, ckpt=ckpt)

    return train_in_parts


@pytest.fixture
def argv_of(tmp_path, shards):
    """Return `run_flags` with the test's own directory and data."""

    def argv_of(*flags, steps=6, ckpt="run") -> list[str]:
        return run_flags(shards, tmp_path / ckpt, *flags, steps=steps)

    return argv_of


@pytest.fixture
def error_of(argv_of, capsys):
    """Run a small model that must fail; return its error."""

    def error_of(*flags, status=2, model=Spider, **options) -> str:
        train_model = partial(command_line, model_class=model)
        return refused(argv_of(*flags, **options), capsys, status, main=train_model)

    return error_of


@pytest.fixture
def new_log(capsys):
    """Return a function that returns the log since its last call."""
    return lambda: capsys.readouterr().err


@pytest.fixture
def losses(monkeypatch):
    """Replace the results of evaluations: these losses at even steps, 2.2 at an odd step, where a
    run ends."""
    at_even_steps = (3.0, 2.0, 2.5, 2.4, 1.0, 1.5, 1.4, 1.3, 1.2, 1.1)
    by_step = dict(zip(range(2, 22, 2), at_even_steps, strict=True))
    record = RunProgress.record_evaluation
    monkeypatch.setattr(
        RunProgress,
        "record_evaluation",
        lambda progress, numbers, counts: record(
            progress, {**numbers, "val_loss": by_step.get(progress.step, 2.2)}, counts
        ),
    )


@pytest.fixture
def figures(tmp_path):
    """Run sample.py with --eval flags; return what it writes to --json."""

    def evaluate(*argv) -> list[dict]:
        out = tmp_path / "out.json"
        assert sample.main([*map(str, argv), "--json", str(out)]) == 0
        return json.loads(out.read_text())

    return evaluate


def refused(argv, capsys, status=2, program="train.py", main=command_line) -> str:
    """Run a command that must fail; return its error, the last line on stderr. Check that the
    command prints no other error, and nothing on stdout."""
    assert main([*map(str, argv)]) == status
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [line for line in lines if line.startswith(f"{program}: ")] == lines[-1:]
    assert all(line.isprintable() for line in lines)
    return lines[-1]


def final_state(directory):
    """Return the state in a run's last checkpoint."""
    return torch.load(find_checkpoints(directory)[-1].path, weights_only=True)


def last_step(directory) -> int:
    """Return the step of a run's last checkpoint."""
    return final_state(directory)["step"]


def saved_steps(directory) -> list[int]:
    """Return the steps of a run's good checkpoints."""
    return [checkpoint.step for checkpoint in find_checkpoints(directory)]


def without_clock(line: dict) -> dict:
    """Return a line of metrics.jsonl without the numbers that differ between equal runs."""
    by_clock = {"tok_per_sec", "bf16_mfu", "memory", "time"}
    return {name: value for name, value in line.items() if name not in by_clock}


def metrics(directory, clock: bool = False) -> list[dict]:
    """Return the lines of metrics.jsonl; with `clock`, including time, speed and memory."""
    text = (directory / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return lines if clock else [without_clock(line) for line in lines]


def assert_same(one, other):
    """Check that nested states are bitwise equal."""
    leaves = [tree_leaves_with_path(state) for state in (one, other)]
    for (path, value), (other_path, other_value) in zip(*leaves, strict=True):
        assert path == other_path
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other_value), keystr(path)
        else:
            assert value == other_value, keystr(path)


def assert_same_runs(one, other):
    """Check that the last checkpoints and the lines of metrics.jsonl of two runs are bitwise
    equal."""
    states = [final_state(one), final_state(other)]
    for state in states:
        state["metrics"] = without_clock(state["metrics"])
    assert_same(*states)
    assert metrics(one) == metrics(other)
