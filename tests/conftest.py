"""Shared by test files: a small model with every component awake, bytes for it, and whole small
runs."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# before transformers is imported: no network, nothing in the home directory
CACHE = tempfile.TemporaryDirectory()
os.environ |= dict(
    HF_HOME=CACHE.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
)
# before torch is: to small models more give nothing, and workers share cores
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch

import data
import train
from spider import curves, estimate
from spider.checkpoint import find_checkpoints
from spider.config import SpiderConfig
from spider.distributed import World
from spider.layers import wide
from spider.memory import EngramTable, MatchMemory
from spider.run import RunProgress
from spider_model import Spider
from tile_moe import multiplies_at_once
from tokenizer import BOS_ID, EOS_ID
from train import Plan, command_line


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def has_fp8(experts: bool = False) -> bool:
    """Return whether the GPU multiplies in FP8, or also the grouped product that `--fp8_experts`
    takes."""
    if experts:
        return multiplies_at_once(torch.device("cuda"), torch.bfloat16)
    return torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """Tests and the processes that they start hear SIGINT and SIGHUP, also under nohup or as a
    background job."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def processes():
    """A server that has imported everything, from which runs and ranks are forked in a tenth of a
    second (jobs.py)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jobs", "bitsandbytes"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # it does not take sys.path from here
        forkserver.ensure_running()
    return context


def do_nothing_slow(patch=setattr):
    """Draw no curves.png and time no step: both take longer than a small run. Tests of these undo
    it."""
    patch(curves, "draw_curves", lambda *_: None)
    patch(train, "time_steps", lambda *_: 1000.0)
    patch(estimate, "free_memory", lambda device: 1e15)  # whatever else runs on this machine


@pytest.fixture(scope="session", autouse=True)
def nothing_slow():
    with pytest.MonkeyPatch.context() as patch:
        do_nothing_slow(patch.setattr)
        yield


def small_config(**changes) -> SpiderConfig:
    """Every component at a size for tests."""
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


def awake(config: SpiderConfig, seed: int = 0, dtype=torch.float32) -> Spider:
    """A model in which nothing is zero and the boundaries hang on the text."""
    torch.manual_seed(seed)
    model = Spider(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "offset_proj" in name or name.endswith(
                (
                    "table.weight",
                    "conv_weight",
                    "lora_up",
                    "null_segment",
                    "out_proj.weight",
                    "bias",
                )
            ):
                p.add_(torch.randn_like(p) * 0.5)
        if config.boundaries == "flexitokens" and config.n_recurrent_layers:
            model.boundary_predictor[2].weight.normal_(std=1.0)
        if config.boundaries == "learned" and config.n_recurrent_layers:
            model.boundary_predictor.regression[2].weight.normal_()
            model.boundary_predictor.entropy.normal_()
            model.boundary_predictor.steps.fill_(100)
        memory = model.engram_output
        for linear in () if memory is None else (memory.logits, memory.votes and memory.votes[2]):
            if linear is not None:
                linear.weight.normal_(std=0.3)
        for memory in (model.engram_input, model.engram_output):
            if memory is not None and memory.followed is not None:
                memory.followed[:, : MatchMemory.NOTHING + 1].normal_(std=0.3)
    model.to(dtype)
    model.compute_dtype = dtype
    return model.train()


def world_of(device: str = "cpu") -> World:
    """A single process on a device."""
    world = World({})
    world.device = torch.device(device)
    return world


def settled(*argv: str, device: str = "cpu", environ=None, **settings) -> Plan:
    """The plan that train.py makes of flags; without the machine's environment."""
    return train.settle(
        train.parse_args([*argv], environ=environ or {}), world_of(device), **settings
    )


def gradients(model: Spider) -> dict:
    """Gradients by parameter's name, None where there is none; of Engram tables the sums of what
    they gathered."""
    found = {name: p.grad for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, EngramTable) and module.gathered():
            found[f"{name}.weight"] = torch.zeros_like(wide(module.weight))
            for row, grad, _ in module.gathered():
                found[f"{name}.weight"].index_add_(0, row, grad)
    return found


def text(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random plain bytes [rows, length]."""
    return torch.randint(32, 127, (rows, length), generator=torch.Generator().manual_seed(seed))


def documents(*lengths: int, seed: int = 0) -> torch.Tensor:
    """One row of documents, BOS ... EOS, each of a given length."""
    row = text(1, sum(lengths), seed)[0]
    end = 0
    for length in lengths:
        row[end], row[end + length - 1], end = BOS_ID, EOS_ID, end + length
    return row[None]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def prepare(*args) -> int:
    """`data.py prepare` in this process, without others to work for it; its exit status."""
    return data.main(["prepare", *map(str, args)])


MEASURED = """
import atexit, re
atexit.register(lambda: print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]))
"""


def measured(code: str, *argv) -> tuple[subprocess.CompletedProcess, int]:
    """Run Python code in a process of its own; also its peak memory in kB, to which getrusage would
    add this one's."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED + code, *argv], cwd=ROOT, text=True, capture_output=True
    )
    return done, int(done.stdout.split()[-1])


SMALL = (
    "hidden_size=32,n_prelude_layers=1,n_recurrent_layers=1,n_coda_layers=1,n_heads=2,"
    "q_lora_rank=16,"
    "kv_lora_rank=16,qk_nope_head_dim=8,qk_rope_head_dim=8,v_head_dim=16,"
    "intermediate_size=48,n_routed_experts=4,"
    "moe_intermediate_size=16,lora_rank=2,engram_layers=0,engram_heads=1,engram_rows=200,"
    "engram_dim=8,"
    "engram_byte_rows=300,engram_byte_dim=8,boundaries=flexitokens,boundary_prior=0.15,"
    "boundary_alpha=0.16666666666666666,boundary_sigma=0.0115,segment_offsets=1,core_loss_weight=0"
)


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path / "data")


def make_shards(directory):
    """A small directory of shards: 640 bytes of documents to train on, some to validate."""
    directory.mkdir()
    generator = np.random.default_rng(0)
    for name, count in (("train-0.bin", 640), ("val-0.bin", 300)):
        ids = generator.choice(np.frombuffer(b"abcdef gh", np.uint8), count).astype("<u2")
        ids[::211], ids[210::211] = BOS_ID, EOS_ID
        ids.tofile(directory / name)
    return directory


# --------------------------------------------------------------------------------------------------
# Runs


def run_flags(shards, directory, *flags, steps=6) -> list[str]:
    """The command line of a run of a small model."""
    return [
        "--data_dir",
        str(shards),
        "--seq_len",
        "32",
        "--micro_batch",
        "2",
        "--max_steps",
        str(steps),
        "--ckpt_every",
        "100",
        "--ckpt_dir",
        str(directory),
        "--set",
        SMALL,
        "--n_loops",
        "2",
        "--lr",
        "0.01",
        "--eval_every",
        "4",
        "--log_every",
        "1",
        "--device",
        "cpu",
        *flags,
    ]


def run(tmp_path, shards, *flags, steps=6, ckpt="run"):
    """Run a small model to its end; return its checkpoint directory."""
    directory = tmp_path / ckpt
    assert command_line(run_flags(shards, directory, *flags, steps=steps)) == 0
    return directory


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The directory of a run of three steps with a checkpoint of each, which no test may change."""
    root = tmp_path_factory.mktemp("trained")
    return run(root, make_shards(root / "data"), "--ckpt_every", "1", "--keep_last", "3", steps=3)


def run_in_parts(tmp_path, shards, *flags, steps, cuts, ckpt="parts"):
    """The same, stopped by SIGTERM in each step of `cuts` and resumed by the same command."""
    argv, take_step = run_flags(shards, tmp_path / ckpt, *flags, steps=steps), train.train_step
    for cut in cuts:

        def stopped(state, cut=cut):
            if state.progress.step + 1 == cut:
                os.kill(os.getpid(), signal.SIGTERM)
            return take_step(state)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "train_step", stopped)
            assert command_line(argv) == 128 + signal.SIGTERM
        assert final_state(tmp_path / ckpt)["step"] == cut
    return run(tmp_path, shards, *flags, steps=steps, ckpt=ckpt)


@pytest.fixture
def losses(monkeypatch):
    """Evaluations find these losses at even steps, whatever the weights, and 2.2 at the odd end of
    a run."""
    by_step = dict(
        zip(range(2, 22, 2), (3.0, 2.0, 2.5, 2.4, 1.0, 1.5, 1.4, 1.3, 1.2, 1.1), strict=True)
    )
    record = RunProgress.record_evaluation
    monkeypatch.setattr(
        RunProgress,
        "record_evaluation",
        lambda progress, loss, counts: record(progress, by_step.get(progress.step, 2.2), counts),
    )


def refused(argv, capsys, status=2, program="train.py", main=command_line) -> str:
    """The last line of a command that fails, which is its only error; nothing is printed on
    stdout."""
    assert main([*map(str, argv)]) == status
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and [line for line in lines if line.startswith(f"{program}: ")] == lines[-1:]
    assert all(line.isprintable() for line in lines)
    return lines[-1]


def final_state(directory):
    return torch.load(find_checkpoints(directory)[-1].path, weights_only=True)


def without_clock(line: dict) -> dict:
    """A line of metrics.jsonl without the numbers that depend on the clock."""
    return {
        name: value
        for name, value in line.items()
        if name not in ("tok_per_sec", "bf16_mfu", "memory", "time")
    }


def metrics(directory) -> list[dict]:
    return [
        without_clock(json.loads(line))
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


def assert_same(a, b, where=""):
    """Equality to the bit of nested states."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{i}")
    else:
        assert a == b, where


def assert_same_runs(one, other):
    """Equality to the bit of the last checkpoints of two runs, and of their lines of
    metrics.jsonl."""
    one_state, other_state = final_state(one), final_state(other)
    for state in (one_state, other_state):
        state["metrics"] = without_clock(state["metrics"])
    assert_same(one_state, other_state)
    assert metrics(one) == metrics(other)
