"""Checkpoints: written atomically, read without executing anything, and refused by name if they do
not fit."""

import copy
import errno
import math
import os
import random
import resource
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import (
    assert_same,
    assert_same_runs,
    final_state,
    make_shards,
    refused,
    run,
    run_flags,
    saved_steps,
)
from jobs import file_limit, forked
from spider import checkpoint, state
from spider.checkpoint import (
    TYPES,
    CheckpointWriter,
    SavedCheckpoint,
    best_checkpoint,
    check_weights,
    good_checkpoints,
    load_checkpoint,
    load_origin,
    lowest_loss,
)
from spider.common import CheckpointError, locked
from spider.config import SpiderConfig
from spider.distributed import World
from spider.machine import start_log
from spider.optim import Optimizers, adamw_8bit
from spider.run import Metrics
from spider.state import NESTED, kind_of, kinds_of_state, load_model
from spider_model import Spider

NO_EVAL = ("--eval_every", "0")


@pytest.fixture(scope="module")
def trained_by(tmp_path_factory) -> dict[str, tuple[dict, Spider, Optimizers]]:
    """By optimizer, the state of a checkpoint after one step, and what it is loaded into."""
    root = tmp_path_factory.mktemp("trained_by")
    shards = make_shards(root / "data")
    found = {}
    for name in ("adamw", "adamw8bit", "muon"):
        saved = final_state(run(root, shards, "--optimizer", name, *NO_EVAL, steps=1, ckpt=name))
        model = Spider(SpiderConfig.from_saved(saved["cfg"]))
        found[name] = saved, model, Optimizers(model, name)
    return found


def steps_in_names(directory) -> list[int]:
    """Steps in the names of a directory's files, which may be damaged."""
    return sorted(int(path.stem[11:]) for path in directory.glob("spider-step*.pt"))


# --------------------------------------------------------------------------------------------------
# Damaged files


def test_altered_byte_or_missing_end_is_refused_or_harmless(tmp_path, shards):
    path = run(tmp_path, shards, *NO_EVAL, steps=1) / "spider-step1.pt"
    content = path.read_bytes()
    original = load_checkpoint(path)
    size = len(content)
    bits = [(offset, offset % 8) for offset in random.Random(0).sample(range(size), 60)]
    bits += [(offset, offset % 8) for offset in (*range(8), *range(size - 90, size))]  # headers
    weight_record = content.rindex(b"PK\1\2", 0, content.rindex(b"/data/0"))
    bits += [(weight_record + 38, bit) for bit in range(8)]  # its external attributes
    refusals = 0
    for offset, bit in bits:
        altered = bytearray(content)
        altered[offset] ^= 1 << bit
        path.write_bytes(altered)
        try:
            assert_same(load_checkpoint(path), original)  # a byte of padding, for example
        except CheckpointError:
            refusals += 1
    assert refusals > 80
    for length in (0, 1, 30, size // 2, size - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_run_resumes_exactly_from_the_checkpoint_before_a_damaged_one(tmp_path, shards, capsys):
    flags = ("--ckpt_every", "3")
    whole = run(tmp_path, shards, *flags, steps=6, ckpt="whole")
    directory = run(tmp_path, shards, *flags, steps=6)
    newest = directory / "spider-step6.pt"
    content = newest.read_bytes()
    altered = content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]
    for damaged in (content[: len(content) // 2], altered, b""):
        newest.write_bytes(damaged)
        run(tmp_path, shards, *flags, steps=6)
        log = capsys.readouterr().err
        assert f"skipped: {newest}" in log
        assert f"resuming from {directory}/spider-step3.pt" in log
        assert_same_runs(directory, whole)


def test_directory_with_only_damaged_checkpoints_is_refused_and_unchanged(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=3)
    (directory / "spider-step3.pt").write_bytes(b"no checkpoint")
    os.mkfifo(directory / "spider-step4.pt")
    (directory / "spider-step5.pt").symlink_to("/dev/zero")
    lines = (directory / "metrics.jsonl").read_bytes()
    assert "none of the checkpoints" in refused(run_flags(shards, directory), capsys)
    assert (directory / "metrics.jsonl").read_bytes() == lines
    assert (directory / "spider-step3.pt").read_bytes() == b"no checkpoint"


def test_directory_in_use_is_refused_except_for_a_dry_run(tmp_path, shards, capsys):
    argv = run_flags(shards, tmp_path)
    with locked(tmp_path):
        assert "another command is using it" in refused(argv, capsys)
        assert train.command_line([*argv, "--dry_run"]) == 0


# --------------------------------------------------------------------------------------------------
# Crafted files: the tables say what is wrong with each

# Values by key
NO_COUNTS = (-1, True, 1.0, "3", None, [1], 1 << 62, 10**400)
NO_LOSSES = ("x", [1.0], 10**400, math.nan, -1.0)
VALUES = {
    "step": NO_COUNTS,
    "bytes_seen": NO_COUNTS,
    "epoch": NO_COUNTS,
    "unimproved": NO_COUNTS,
    "skipped": NO_COUNTS,
    "best_loss": (*NO_LOSSES, None),
    "lowest_peak": (*NO_LOSSES, None),
    "val_loss": NO_LOSSES,
    "metrics": ({(): 2.0}, [], "x", 3),
    "metrics.loss": ("x", [1], torch.ones(()), 10**400),
    "recent": (["a"], [None], [math.nan], [10**400], {}, "ab", None, 3),
    "exploded": ("no", 1, None),
    "wandb": (3, {"name": "a", "id": 3}, "a", []),
    "n_loops": (0, True, -1, 4097, 10**9, 2.0, None),
    "recipe": ("2b", None, [], {}, 3),
    "targets": ([1.0], ["a"], [-1], [None], 3, {}, None, (1,)),
    "shares": (["a"], [None], [math.nan], 3, None),
    "flags": ({(): 2}, 3, None, []),
    "flags.lr": (torch.ones(2), [1], 10**400),
    "flags.seq_len": (1, "32", 1 << 25),
    "flags.eval_tokens": (0, 1.5),
    "flags.target_tokens": (None,),
    "flags.data_dir": (3,),
    "flags.minutes": ("x",),
    "cfg": ({1: 2}, [], None, 3),
    "cfg.hidden_size": (1 << 40,),
    "cfg.n_loops": (10**9,),
    "cfg.dim": (3,),
    "cfg.act": (1,),
    "cfg.engram_contexts": ([3, "4"],),
    "model_state_dict": ([], None, 3),
    "optimizer_state_dict": ([], None, 3),
}
# Expressions of a good tensor t. With a stride of 0, fused kernels would write far beyond it.
TENSORS = """
    torch.zeros((), dtype=t.dtype).expand(t.shape)
    torch.stack((t, t), -1).mT
    torch.stack((t, t))[0]
    torch.stack((t, t))[1]
    t.to_sparse()
    t.reshape(-1, 1).to_sparse_csr()
    torch.nn.Parameter(t.float())
    t.to("meta")
    torch.nested.nested_tensor([t.reshape(-1)] * 2)
    torch.quantize_per_tensor(t.float(), 1, 0, torch.qint8)
    torch.complex(t.float(), t.float()).conj()
    torch.complex(t.float(), t.float()).conj().imag
    t.short()
    t.bool()
    t.to(torch.complex64)
    t.float().to(torch.float8_e5m2)
    t.flatten()[:1].clone()
    t[..., None].clone()
    [1.0]
    "3"
    None
    {}
"""
# Statements that change the weights, AdamW's groups of parameters, its values by parameter, or
# those of the first parameter
STATES = """
    first["step"] = torch.tensor(-1.0)
    first["step"] = torch.tensor(math.nan)
    first["step"] = torch.tensor(2.0**31)
    first["step"] = 1
    first["other"] = first.pop("exp_avg")
    first["more"] = torch.ones(3)
    del first["step"]
    first["exp_avg"] = first["exp_avg_sq"]
    first["exp_avg"] = first["exp_avg"].mT.contiguous().mT
    first["exp_avg"] = torch._neg_view(first["exp_avg"])
    first["step"] = by_param[1]["step"]
    by_param[0] = by_param[1]
    by_param[0] = [1]
    by_param[999] = {}
    by_param["x"] = {}
    groups[0]["params"].pop()
    groups[0]["params"] = ["a"]
    groups[0].clear()
    groups.pop()
    groups.clear()
    saved["optimizer_state_dict"]["adamw"] = [1]
    saved["optimizer_state_dict"] = {}
    del saved["optimizer_state_dict"]
    del weights["lm_head.weight"]
    weights["more"] = torch.ones(3)
    weights["more"] = None
    weights[3] = torch.ones(3)
    by_param["itself"] = by_param
    for _ in range(60): by_param[0] = dict(a=by_param[0], b=by_param[0])
"""


class Harmful:
    """Its pickle would make a file."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __reduce__(self):
        return open, (str(self.directory / "harm"), "w")


def rewrite(path: Path, change: Callable[[bytes], bytes] = bytes, again: bool = False, **options):
    """Write a checkpoint's archive with another pickle; again: its largest record has two names."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in records.items():
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)
        if again:
            other = copy.copy(max(archive.filelist, key=lambda info: info.file_size))
            other.filename = "archive/data/1000"
            archive.filelist.append(other)
        for info in archive.filelist:
            info.external_attr = 0  # as torch writes it


def deepened(pickled: bytes) -> bytes:
    """Replace a text in a pickle by 200,000 nested dicts."""
    deep = b"}" + b"X\1\0\0\0a}" * 200_000 + b"s" * 200_000
    return pickled.replace(b"X\4\0\0\0MARK", deep)


def crafted_files(path: Path, saved: dict, part: str) -> Iterator[str]:
    """Write a part of the crafted files, one at a time; yield the name of each."""
    if part == "files":
        yield "none"
        path.write_text("no checkpoint")
        yield "text"
        path.unlink()
        os.mkfifo(path)
        yield "pipe"
        path.unlink()
        path.symlink_to("/dev/zero")
        yield "endless device"
        path.unlink()
        torch.save(saved | dict(epoch=Harmful(path.parent)), path)
        yield "code"
        for name, options in dict(
            compressed=dict(compression=zipfile.ZIP_DEFLATED),
            overlapping=dict(again=True),
            long_pickle=dict(change=lambda pickled: pickled + bytes(20 << 20)),
            deep=dict(change=deepened),
        ).items():
            states = dict(adamw="MARK") if name == "deep" else saved["optimizer_state_dict"]
            torch.save(saved | dict(optimizer_state_dict=states), path)
            rewrite(path, **options)
            yield name
    elif part == "values":
        for key, values in VALUES.items():
            for value in values:
                changed = saved | dict(model_state_dict={}, optimizer_state_dict={})
                table, _, name = key.rpartition(".")
                changed |= {table: changed[table] | {name: value}} if table else {name: value}
                torch.save(changed, path)
                yield f"{key}: {str(value)[:50]}"
    elif part == "states":
        for statement in STATES.strip().splitlines():
            torch.save(changed_by(statement, saved, "adamw"), path)
            yield statement
    else:
        for table, key in each_tensor(saved, part):
            whole = table[key]
            for expression in TENSORS.strip().splitlines():
                table[key] = eval(expression.strip(), globals(), dict(t=whole))
                torch.save(saved, path)
                yield f"{key} {expression}"
            table[key] = whole


def changed_by(statement: str, saved: dict, optimizer: str) -> dict:
    """Return a copy of a state that a statement of the tables has changed."""
    saved = copy.deepcopy(saved)
    of_optimizer = saved["optimizer_state_dict"][optimizer]
    names = dict(
        saved=saved,
        weights=saved["model_state_dict"],
        groups=of_optimizer["param_groups"],
        by_param=of_optimizer["state"],
        first=of_optimizer["state"][0],
        large=[values for values in tables_of(saved, optimizer) if "qmap1" in values],
    )
    exec(statement.strip(), globals() | names)
    return saved


def tables_of(saved: dict, part: str) -> list[dict]:
    """Return the dicts that hold an optimizer's tensors, or the weights; 8-bit AdamW nests them."""
    if part == "weights":
        return [saved["model_state_dict"]]
    by_param = saved["optimizer_state_dict"][part]["state"].values()
    return [values.get(NESTED, values) for values in by_param]


def each_tensor(saved: dict, part: str) -> Iterator[tuple[dict, str]]:
    """Yield the place of a tensor of each dtype that has dimensions: a dict, and the key."""
    seen = set()
    for table in tables_of(saved, part):
        for key, value in table.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.dtype not in seen:
                seen.add(value.dtype)
                yield table, key


def resume(path: Path, state: dict, model: Spider, optimizers: Optimizers):
    """Load a state as a run does."""
    check_weights(path, state, model)
    load_model(model, state["model_state_dict"])
    optimizers.load_state_dict(state["optimizer_state_dict"])


@pytest.mark.filterwarnings(
    "ignore:.*beta state", "ignore:.*prototype stage", "ignore:.*quantize", "ignore:.*complex"
)
@pytest.mark.parametrize(
    "part, optimizer",
    (
        ("files", "adamw"),
        ("values", "adamw"),
        ("states", "adamw"),
        ("adamw", "adamw"),
        ("adamw8bit", "adamw8bit"),
        ("muon", "muon"),
        ("engram", "muon"),
        ("weights", "muon"),
    ),
)
def test_crafted_file_is_refused_in_a_line_soon_and_in_little_memory(
    tmp_path, trained_by, part, optimizer
):
    saved, model, optimizers = trained_by[optimizer]
    path = tmp_path / "crafted.pt"
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + (1 << 20)  # KiB
    for name in crafted_files(path, copy.deepcopy(saved), part):
        began = time.perf_counter()
        with pytest.raises(CheckpointError) as fault:
            state = load_checkpoint(path)
            if part != "values":
                resume(path, state, model, optimizers)
            pytest.fail(f"{name} is loaded")
        line = str(fault.value)
        assert line.isprintable() and len(line) < 500, (name, line)
        assert time.perf_counter() - began < 20, name
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < most, name
        assert set(os.listdir(tmp_path)) <= {"crafted.pt"}, name


@pytest.mark.parametrize(
    "statement",
    ('first["step"] = torch.tensor(math.nan)', 'first["exp_avg"] = first["exp_avg_sq"]'),
)
def test_run_resumes_from_the_checkpoint_before_one_whose_optimizer_state_is_crafted(
    tmp_path, trained_by, statement
):
    saved, _, _ = trained_by["adamw"]
    step = saved["step"]
    torch.save(saved, tmp_path / f"spider-step{step}.pt")
    changed = changed_by(statement, saved, "adamw") | dict(step=step + 1)
    torch.save(changed, tmp_path / f"spider-step{step + 1}.pt")
    assert load_origin(tmp_path, None, False).path == tmp_path / f"spider-step{step}.pt"


HARMLESS = """
    saved["note"] = ["by another program"]
    saved["val_loss"] = math.inf
    saved["recent"] = [math.inf]
    saved["metrics"] = dict(loss=math.nan, skipped=True, lr=None)
    saved["metrics"] = {1: 2.0}
    saved["wandb"] = {}
    saved["flags"]["lr"] = math.nan
    weights["lm_head.weight"] = weights["lm_head.weight"].double()
    weights["lm_head.weight"] = weights["lm_head.weight"].half()
    weights["lm_head.weight"] = weights["lm_head.weight"].bfloat16()
    groups[0]["lr"] = math.nan
    groups[0] |= dict(betas="x", fused=False, capturable=True, foreign=[1])
    del by_param[0]
    [values.update(qmap1=large[0]["qmap1"]) for values in large]
"""


@pytest.mark.parametrize("statement", HARMLESS.strip().splitlines())
def test_harmless_change_is_loaded(tmp_path, trained_by, statement):
    """A value without a consequence; another dtype of weights; settings of an optimizer, which
    keeps its own; one before its first step; tables that are only read, and share their memory."""
    saved, model, optimizers = trained_by["adamw8bit"]
    groups = copy.deepcopy(optimizers.state_dict()["adamw8bit"]["param_groups"])
    path = tmp_path / "a.pt"
    torch.save(changed_by(statement, saved, "adamw8bit"), path)
    resume(path, load_checkpoint(path), model, optimizers)
    assert optimizers.state_dict()["adamw8bit"]["param_groups"] == groups


def test_checkpoint_without_loops_of_training_has_those_of_its_model(tmp_path, trained_by):
    saved, model, _ = trained_by["muon"]
    path = tmp_path / "a.pt"
    torch.save({name: value for name, value in saved.items() if name != "n_loops"}, path)
    assert load_checkpoint(path)["n_loops"] == model.config.n_loops


def test_every_key_of_a_checkpoint_has_a_type(trained_by):
    saved, _, _ = trained_by["muon"]
    assert saved.keys() <= TYPES.keys()


def test_state_of_a_parameter_that_blocks_do_not_divide_is_expected():
    weight = torch.nn.Parameter(torch.ones(5, 900))
    optimizer = adamw_8bit([dict(params=[weight])], 0.1, (0.9, 0.95), ())
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kinds = kind_of(optimizer.state_dict()["state"][0])
    assert kinds in kinds_of_state("adamw8bit", torch.float32, (5, 900))


# --------------------------------------------------------------------------------------------------
# Of another model


def test_run_whose_weights_do_not_fit_its_model_is_not_resumed(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=1)
    saved = final_state(directory)
    weights = saved["model_state_dict"]
    for name in ("embed_tokens", "lm_head.weight", "null_segment"):
        weights[name] = weights[name][1:].clone()
    torch.save(saved, directory / "spider-step1.pt")
    line = refused(run_flags(shards, directory), capsys)
    assert "embed_tokens, lm_head.weight, null_segment: load it" in line


def test_other_optimizer_than_the_checkpoints_is_refused_by_name(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--optimizer", "adamw", steps=1)
    before = (directory / "spider-step1.pt").read_bytes()
    line = refused(run_flags(shards, directory, "--optimizer", "muon"), capsys)
    assert "adamw, engram" in line
    assert "muon, adamw, engram" in line
    assert [path.read_bytes() for path in directory.glob("*.pt")] == [before]


@pytest.mark.parametrize("flags", ((), ("--reset_steps",)))
def test_other_model_than_the_checkpoints_is_refused_with_its_fields(
    tmp_path, shards, flags, capsys
):
    origin = run(tmp_path, shards, steps=1) / "spider-step1.pt"
    argv = run_flags(shards, tmp_path / "new", "--resume", origin, *flags)
    for setting, named in (
        ("hidden_size=64", "hidden_size is 32, not 64"),
        (
            "act_threshold=0.5,boundaries=words,segment_offsets=3",
            "segment_offsets is 1, not 3; act_threshold is 0.99, not 0.5. Leave",
        ),
    ):
        assert named in refused([*argv, "--set", setting], capsys)
    argv = f"--data_dir {shards} --ckpt_dir {tmp_path / 'new'} --model small --resume {origin}"
    assert "hidden_size is 32, not 256; " in refused([*argv.split(), *flags], capsys)


# --------------------------------------------------------------------------------------------------
# Writing


def writer_in(directory) -> CheckpointWriter:
    return CheckpointWriter(directory, keep_last=2, keep_best=False, world=World({}))


def save(writer, step, **more):
    writer.save(dict(step=step, exploded=False, val_loss=None) | more, lambda: None)


def test_save_copies_the_state_and_waits_only_for_the_previous_write(tmp_path):
    weight = torch.zeros(1000)
    writer = writer_in(tmp_path)
    memory = set()
    for step in (1, 2):
        may_write = Event()
        writer.thread.submit(may_write.wait)
        weight.fill_(step)  # training continues while the previous step's file is not written
        save(writer, step, nested=dict(weight=weight))
        memory.add(writer.host_copy["nested"]["weight"].data_ptr())
        assert steps_in_names(tmp_path) == [*range(1, step)]
        Timer(0.2, may_write.set).start()
    assert writer.holds(2) and not writer.holds(1)
    for step in (1, 2):
        saved = torch.load(tmp_path / f"spider-step{step}.pt")
        assert (saved["nested"]["weight"] == step).all()
    assert len(memory) == 1  # the second copy has taken that of the first


def test_save_waits_for_copies_out_of_gpu_memory_before_it_writes(tmp_path, monkeypatch):
    """Buffers stand in for pinned memory: a copy into it ends when the host waits for it."""
    writer = writer_in(tmp_path)
    copies = []

    def host_buffer(shape, *_):
        buffer = torch.zeros(shape)

        def copy_(value, non_blocking):
            copies.append((buffer, value))
            return buffer

        return SimpleNamespace(copy_=copy_)

    def synchronize():
        writer.thread.submit(int).result()  # a write that had begun would end before
        for buffer, value in copies:
            buffer.copy_(value)

    monkeypatch.setattr(state, "host_buffer", host_buffer)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    save(writer, 1, weight=torch.ones(3))
    assert writer.holds(1)
    assert torch.load(tmp_path / "spider-step1.pt")["weight"].tolist() == [1, 1, 1]


def test_unfinished_files_of_a_killed_process_are_deleted(tmp_path, capsys):
    (tmp_path / ".spider-step7.pt.0123abcd.tmp").touch()
    (tmp_path / ".spider-step6.pt.0123abcd.tmp").mkdir()  # stands for one that cannot be deleted
    (tmp_path / "spider-step5.pt").touch()
    writer_in(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".spider-step6.pt.0123abcd.tmp", "spider-step5.pt"]
    assert capsys.readouterr().err.count("cannot be deleted") == 1


def test_old_checkpoint_that_cannot_be_deleted_is_logged_once_and_saves_continue(tmp_path, capsys):
    start_log()
    writer = writer_in(tmp_path)
    save(writer, 1)
    assert writer.holds(1)
    (tmp_path / "spider-step1.pt").unlink()
    (tmp_path / "spider-step1.pt").mkdir()  # root may delete any file, but not a directory so
    for step in (2, 3, 4, 5):
        save(writer, step)
        assert writer.holds(step)
    assert capsys.readouterr().err.count("cannot be deleted") == 1
    assert steps_in_names(tmp_path) == [1, 4, 5]


def test_newest_two_checkpoints_that_had_not_exploded_are_kept_beside_the_newest(tmp_path):
    writer = writer_in(tmp_path)
    kept = []
    for step in range(1, 8):
        save(writer, step, exploded=step in (3, 4, 5))
        writer.holds(step)
        kept.append(steps_in_names(tmp_path))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 4, 5], [2, 5, 6], [6, 7]]


def test_metrics_are_synced_before_a_checkpoint_gets_its_name(tmp_path, shards, monkeypatch):
    """Else a power loss could leave a checkpoint whose lines are missing."""
    events = []
    write, fsync, replace = Metrics.write, os.fsync, os.replace

    def noted_write(metrics_file, line):
        events.append("line")
        write(metrics_file, line)

    def noted_fsync(descriptor):
        path = os.readlink(f"/dev/fd/{descriptor}")
        events.append(f"synced {os.path.basename(path)}")
        fsync(descriptor)

    def noted_replace(old, new):
        events.append(f"named {os.path.basename(new)}")
        replace(old, new)

    monkeypatch.setattr(Metrics, "write", noted_write)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    directory = run(tmp_path, shards, *NO_EVAL, steps=2)
    named = events.index("named spider-step2.pt")
    last_line, metrics_synced, file_synced = events[named - 3 : named]
    assert "line" not in events[named:]
    assert last_line == "line"
    assert metrics_synced == "synced metrics.jsonl"
    assert file_synced.startswith("synced .spider-step2.pt.")
    assert events[named + 1] == f"synced {directory.name}"


def test_full_disk_is_one_line_and_a_later_save_succeeds(tmp_path, shards, monkeypatch, capsys):
    directory = run(tmp_path, shards, steps=2)
    write = checkpoint.write_archive
    steps = []

    def write_unless_first(file, saved):
        steps.append(saved["step"])
        if len(steps) == 1:
            file.write(b"a part of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, saved)

    monkeypatch.setattr(checkpoint, "write_archive", write_unless_first)
    run(tmp_path, shards, "--ckpt_every", "4", "--keep_last", "9", steps=8)
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert steps == [4, 8]
    assert saved_steps(directory) == [2, 8]


def test_disk_that_stays_full_ends_in_status_2_and_keeps_older_checkpoints(
    tmp_path, shards, processes
):
    """The kernel refuses: no file may grow beyond 100 kB, and a checkpoint is larger."""
    directory = run(tmp_path, shards, *NO_EVAL, steps=2)
    before = (directory / "spider-step2.pt").read_bytes()
    argv = run_flags(shards, directory, "--ckpt_every", "4", *NO_EVAL, steps=6)
    status, log = forked(processes, tmp_path, *argv, faults=[(file_limit, 0, 100_000)])
    assert status == 2
    assert "resumes from the newest checkpoint there" in log.splitlines()[-1]
    (line,) = [line for line in log.splitlines() if "CHECKPOINT NOT SAVED" in line][:1]
    assert "File too large" in line
    assert [path.read_bytes() for path in directory.glob("*.pt")] == [before]
    assert not list(directory.glob(".*.tmp"))


# --------------------------------------------------------------------------------------------------
# Which are kept, and which is resumed

WITHOUT_BEST = ("--eval_every", "2", "--ckpt_every", "3")


def test_keep_best_keeps_the_lowest_validation_loss_beside_the_newest(tmp_path, shards, losses):
    """Steps 4 and 10 are the best so far, and no multiples of --ckpt_every; wherever the run was
    cut, it is known."""
    for steps, best in ((5, 4), (9, 4), (12, 10), (18, 10)):
        directory = run(tmp_path, shards, *WITHOUT_BEST, "--keep_best", steps=steps)
        assert best_checkpoint(directory).step == best
    assert steps_in_names(directory) == [10, 15, 18]
    assert best_checkpoint(directory).val_loss == 1.0


def test_a_step_that_is_saved_again_counts_once(tmp_path):
    writer = writer_in(tmp_path)
    for step in (9, 10, 10):
        save(writer, step)
        assert writer.holds(step)
    assert [path.stem[11:] for path in checkpoint.checkpoint_paths(tmp_path)] == ["9", "10"]


def test_of_equal_losses_the_oldest_is_the_best():
    saved = [
        SavedCheckpoint(step, Path(), val_loss=loss, best_loss=1.0)
        for step, loss in enumerate((2.0, 1.0, 1.0, None))
    ]
    assert lowest_loss(saved) is saved[1]


def test_damaged_checkpoint_of_a_later_step_does_not_count_as_kept(tmp_path, shards):
    """Only a look at its tensors shows the damage. Another directory has nothing saved yet."""
    directory = run(tmp_path, shards, "--ckpt_every", "1", *NO_EVAL, steps=2)
    other = ("--ckpt_every", "1", *NO_EVAL, "--resume", directory / "spider-step1.pt")
    assert steps_in_names(run(tmp_path, shards, *other, steps=2, ckpt="other")) == [1, 2]
    content = bytearray((directory / "spider-step2.pt").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 100] = bytes(100)
    (directory / "spider-step2.pt").write_bytes(content)
    assert saved_steps(directory) == [1, 2]
    run(tmp_path, shards, "--ckpt_every", "3", *NO_EVAL, steps=3)
    assert steps_in_names(directory) == [1, 2, 3]


def test_best_checkpoint_without_keep_best_is_the_best_of_the_newest(tmp_path, shards, losses):
    directory = run(tmp_path, shards, *WITHOUT_BEST, steps=18)
    assert steps_in_names(directory) == [15, 18]
    assert best_checkpoint(directory).step == 18
    without = run(tmp_path, shards, *NO_EVAL, steps=3, ckpt="without")
    with pytest.raises(CheckpointError, match="no checkpoint in it was saved after an evaluation"):
        best_checkpoint(without)


def test_renamed_checkpoint_is_skipped(tmp_path, shards, capsys):
    """Else every restart would go back to it."""
    flags = ("--ckpt_every", "2", *NO_EVAL)
    directory = run(tmp_path, shards, *flags, steps=4)
    content = (directory / "spider-step2.pt").read_bytes()
    for name in ("spider-step1.pt", "spider-step9.pt", "spider-step2-mine.pt"):
        (directory / name).write_bytes(content)
    assert saved_steps(directory) == [2, 4]
    path, _ = next(good_checkpoints(directory))
    assert path == directory / "spider-step4.pt"
    (directory / "spider-step2-mine.pt").unlink()
    run(tmp_path, shards, *flags, steps=5)
    log = capsys.readouterr().err
    assert "spider-step9.pt is renamed: it holds step 2" in log
    assert "spider-step4.pt (step 4)" in log
    assert steps_in_names(directory)[-2:] == [5, 9]
