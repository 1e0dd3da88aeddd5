"""Shared by test files: a small model in which no component is zero, bytes for it, and whole runs
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
# Before transformers is imported: no network, nothing in the home directory.
CACHE = tempfile.TemporaryDirectory()
os.environ |= dict(
    HF_HOME=CACHE.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
)
# Before torch is imported: small models gain nothing from threads, and workers share cores.
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
from spider.training import curves, estimate
from spider.training.checkpoint import find_checkpoints
from spider.training.distributed import World
from spider.training.plan import Plan, resolve_plan
from spider.training.run import RunProgress
from spider_model import Spider
from tile_moe import has_grouped_kernel
from tokenizer import BOS_ID, EOS_ID
from train import command_line


def pytest_collection_modifyitems(items):
    for item in items:
        # not `keywords`, which have the names of directories
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def has_fp8(experts: bool = False) -> bool:
    """Return whether the GPU multiplies in FP8; with `experts`, also in grouped products, as
    --fp8_experts needs."""
    if experts:
        return has_grouped_kernel(torch.device("cuda"), torch.bfloat16)
    return torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """Let tests receive SIGINT and SIGHUP, also where pytest runs under nohup or in the background.
    The processes that they start inherit this."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def processes():
    """Start a server that has imported everything. Runs and ranks are forked from it in a tenth of
    a second (jobs.py)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jobs", "bitsandbytes"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server has its own sys.path
        forkserver.ensure_running()
    return context


def do_nothing_slow(patch=setattr):
    """Draw no curves.png and time no step, because both take longer than a small run. The tests of
    these two undo it."""
    patch(curves, "draw_curves", lambda *_: None)
    patch(train, "time_steps", lambda *_: 1000.0)
    patch(estimate, "free_memory", lambda device: 1e15)  # other programs need memory, too


@pytest.fixture(scope="session", autouse=True)
def nothing_slow():
    with pytest.MonkeyPatch.context() as patch:
        do_nothing_slow(patch.setattr)
        yield


def small_config(**changes) -> SpiderConfig:
    """Return a config with every component, at a size for tests."""
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
    """Build a model without values, of any size."""
    with torch.device("meta"):
        return Spider(config)


def weights_of(model) -> dict[str, torch.Tensor]:
    """Copy the weights and buffers of a model."""
    return {key: value.clone() for key, value in model.state_dict().items()}


# Parameters that initialization sets to zero, so that a component adds nothing at first.
ZERO_AT_FIRST = "table.weight conv_weight lora_up null_segment out_proj.weight bias"


@torch.no_grad()
def awake(config: SpiderConfig, seed: int = 0, dtype=torch.float32) -> Spider:
    """Return a model in which every component has an effect, and boundaries depend on the text."""
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


def world_of(device: str = "cpu") -> World:
    """Return a world of one process on a device."""
    return World({}, device)


def resolved(*argv: str, device: str = "cpu", environ=None, **settings) -> Plan:
    """Return the plan that train.py makes of flags, without this machine's variables."""
    args = train.parse_args([*argv], environ=environ or {})
    return resolve_plan(args, train.RECIPES, world_of(device), **settings)


def gradients(model: Spider) -> dict:
    """Return gradients by the parameter's name, None where there is none. A table's gradient is the
    sum of what it gathered."""
    found = {name: p.grad for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, EngramTable) and has_lookups(module):
            row, grad = lookups_of(module)
            sums = torch.zeros_like(wide(module.weight))
            found[f"{name}.weight"] = sums.index_add_(0, row, grad)
    return found


def has_lookups(table: EngramTable) -> bool:
    """Return whether a table holds gradients."""
    return bool(table.lookups) or table.sums is not None


def lookups_of(table: EngramTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [n] and gradients [n, dim] that a table holds; a row may come several
    times."""
    rows = [row for row, _ in table.lookups]
    gradients = [grad for _, grad in table.lookups]
    if table.sums is not None:
        rows.append(torch.arange(len(table.sums), device=table.sums.device))
        gradients.append(table.sums)
    return torch.cat(rows), torch.cat(gradients)


def text(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random printable bytes [rows, length]."""
    return torch.randint(32, 127, (rows, length), generator=torch.Generator().manual_seed(seed))


def documents(*lengths: int, seed: int = 0) -> torch.Tensor:
    """Return one row [1, sum(lengths)] of documents BOS ... EOS of these lengths."""
    row = text(1, sum(lengths), seed)[0]
    start = 0
    for length in lengths:
        row[start] = BOS_ID
        row[start + length - 1] = EOS_ID
        start += length
    return row[None]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def prepare(*args) -> int:
    """Run `data.py prepare` in this process, without workers; return its exit status."""
    return data.main(["prepare", *map(str, args)])


def code_blocks(page: str) -> list[str]:
    """Return the blocks of Python code of a page of docs/."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def run_python(code: str, *words, cwd=ROOT, **environ) -> subprocess.CompletedProcess:
    """Run Python code in a process of its own, which can import the project."""
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
    """Run Python code in a process of its own; return it and its peak memory in kB. getrusage would
    count this process's memory, too."""
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
    """Give a test's relative paths a directory of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path / "data")


def make_shards(directory):
    """Make a directory with 640 bytes of documents to train on and 300 to validate."""
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

STOPPED = 128 + signal.SIGTERM  # the status of a run that SIGTERM has stopped


def run_flags(shards, directory, *flags, steps=6) -> list[str]:
    """Return the command line of a run of a small model. `flags` are texts of any number of words,
    which override those here, or paths."""
    argv = f"""
        --seq_len 32 --micro_batch 2 --max_steps {steps} --ckpt_every 100 --set {SMALL} --n_loops 2
        --lr 0.01 --eval_every 4 --log_every 1 --device cpu
    """.split()
    argv += ["--data_dir", str(shards), "--ckpt_dir", str(directory)]
    for flag in flags:
        argv += flag.split() if isinstance(flag, str) else [str(flag)]
    return argv


def run(tmp_path, shards, *flags, steps=6, ckpt="run", status=0, model=Spider):
    """Run a small model, which must end with this status; return its checkpoint directory."""
    directory = tmp_path / ckpt
    argv = run_flags(shards, directory, *flags, steps=steps)
    assert command_line(argv, model) == status
    return directory


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The directory of a run of three steps with a checkpoint of each, which no test may change."""
    root = tmp_path_factory.mktemp("trained")
    return run(root, make_shards(root / "data"), "--ckpt_every 1 --keep_last 3", steps=3)


@pytest.fixture
def run_on(processes, tmp_path):
    """Run command lines in turn on several ranks, which must all end with this status; return the
    log."""
    from jobs import Job  # it imports this file

    def run_on(ranks, *argvs, status=0, **options) -> str:
        statuses, log = Job(processes, tmp_path, ranks, *argvs, **options).end()
        assert statuses == [status] * ranks, log
        return log

    return run_on


def model_with_fault(number: int, fault: Callable[[Spider], None]) -> type[Spider]:
    """Return a class of models that call `fault` before their training pass of this number."""
    passes = itertools.count(1)

    class Faulty(Spider):
        def forward(self, *args, **options):
            if self.training and next(passes) == number:
                fault(self)
            return super().forward(*args, **options)

    return Faulty


@contextmanager
def signal_in_step(number: int) -> Iterator[None]:
    """Send SIGTERM to this process before the update of its step of this number, from 1."""
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
    """`run` in the test's own directory, on its own data."""
    return partial(run, tmp_path, shards)


@pytest.fixture
def train_in_parts(train_small):
    """The same as `train_small`, but stopped by SIGTERM in each step of `cuts` and resumed by the
    same command."""

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
    """`run_flags` in the test's own directory, on its own data."""

    def argv_of(*flags, steps=6, ckpt="run") -> list[str]:
        return run_flags(shards, tmp_path / ckpt, *flags, steps=steps)

    return argv_of


@pytest.fixture
def error_of(argv_of, capsys):
    """Return the error of a run of a small model that fails."""

    def error_of(*flags, status=2, model=Spider, **options) -> str:
        train_model = partial(command_line, model_class=model)
        return refused(argv_of(*flags, **options), capsys, status, main=train_model)

    return error_of


@pytest.fixture
def new_log(capsys):
    """Return what was logged since the last call."""
    return lambda: capsys.readouterr().err


@pytest.fixture
def losses(monkeypatch):
    """Let evaluations find these losses at even steps, whatever the weights; at an odd step, where
    a run ends, 2.2."""
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
    """Run sample.py --eval; return what it writes to --json."""

    def evaluate(*argv) -> list[dict]:
        out = tmp_path / "out.json"
        assert sample.main([*map(str, argv), "--json", str(out)]) == 0
        return json.loads(out.read_text())

    return evaluate


def refused(argv, capsys, status=2, program="train.py", main=command_line) -> str:
    """Run a command that fails; return the last line on stderr, which is its only error. Nothing is
    printed on stdout."""
    assert main([*map(str, argv)]) == status
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [line for line in lines if line.startswith(f"{program}: ")] == lines[-1:]
    assert all(line.isprintable() for line in lines)
    return lines[-1]


def final_state(directory):
    """Return the state in the last checkpoint of a run."""
    return torch.load(find_checkpoints(directory)[-1].path, weights_only=True)


def last_step(directory) -> int:
    """Return the step of a run's last checkpoint."""
    return final_state(directory)["step"]


def saved_steps(directory) -> list[int]:
    """Return the steps of a run's good checkpoints."""
    return [checkpoint.step for checkpoint in find_checkpoints(directory)]


def without_clock(line: dict) -> dict:
    """Return a line of metrics.jsonl without the numbers that depend on the clock."""
    by_clock = {"tok_per_sec", "bf16_mfu", "memory", "time"}
    return {name: value for name, value in line.items() if name not in by_clock}


def metrics(directory, clock: bool = False) -> list[dict]:
    """Return the lines of metrics.jsonl; the numbers that depend on the clock only with `clock`."""
    text = (directory / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return lines if clock else [without_clock(line) for line in lines]


def assert_same(one, other):
    """Check that nested states are equal to the bit."""
    leaves = [tree_leaves_with_path(state) for state in (one, other)]
    for (path, value), (other_path, other_value) in zip(*leaves, strict=True):
        assert path == other_path
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other_value), keystr(path)
        else:
            assert value == other_value, keystr(path)


def assert_same_runs(one, other):
    """Check that the last checkpoints of two runs and their lines of metrics.jsonl are equal to
    the bit."""
    states = [final_state(one), final_state(other)]
    for state in states:
        state["metrics"] = without_clock(state["metrics"])
    assert_same(*states)
    assert metrics(one) == metrics(other)
