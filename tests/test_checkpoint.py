"""Checkpoints: written atomically, read without executing anything, and refused by name if they do
not fit."""

import copy
import errno
import math
import os
import random
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import (
    assert_same,
    assert_same_runs,
    final_state,
    make_shards,
    metrics,
    refused,
    run,
    run_flags,
)
from jobs import file_limit, forked, until
from spider import checkpoint, state
from spider.checkpoint import (
    REQUIRED,
    CheckpointWriter,
    SavedCheckpoint,
    best_checkpoint,
    check_state,
    check_weights,
    find_checkpoints,
    load_checkpoint,
    load_newest,
    lowest_loss,
)
from spider.common import LIMITS, CheckpointError, locked
from spider.config import SpiderConfig
from spider.distributed import World
from spider.machine import start_log
from spider.optim import Optimizers
from spider.run import Metrics, RunProgress
from spider_model import Spider

NO_EVAL = ("--eval_every", "0")


@pytest.fixture(scope="module")
def trained_by(tmp_path_factory) -> dict[str, dict]:
    """States of checkpoints after one step, by optimizer."""
    root = tmp_path_factory.mktemp("trained_by")
    shards = make_shards(root / "data")
    states = {}
    for name in ("adamw", "adamw8bit", "muon"):
        directory = run(root, shards, "--optimizer", name, *NO_EVAL, steps=1, ckpt=name)
        states[name] = final_state(directory)
    return states


@pytest.fixture
def trained(trained_by) -> dict:
    return copy.deepcopy(trained_by["muon"])


def check(saved: dict):
    """Check a state as if it were read from a.pt."""
    check_state(Path("a.pt"), saved, REQUIRED)


def saved_again(tmp_path, saved: dict) -> Path:
    path = tmp_path / "foreign.pt"
    with warnings.catch_warnings():  # torch's, of layouts in beta
        warnings.simplefilter("ignore")
        torch.save(saved, path)
    return path


def steps_in(directory) -> list[int]:
    """Steps of the good checkpoints of a directory."""
    return [one.step for one in find_checkpoints(directory)]


def steps_in_names(directory) -> list[int]:
    """Steps in the names of a directory's files, which may be damaged."""
    return sorted(int(path.stem[11:]) for path in directory.glob("spider-step*.pt"))


# --------------------------------------------------------------------------------------------------
# Damaged and foreign files


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


@pytest.mark.parametrize(
    "compression, copies", ((zipfile.ZIP_DEFLATED, 0), (zipfile.ZIP_STORED, 1))
)
def test_file_whose_records_exceed_its_size_or_their_limit_is_refused(
    tmp_path, monkeypatch, compression, copies
):
    path = saved_again(tmp_path, dict(step=1, weight=torch.zeros(100_000)))
    with monkeypatch.context() as patch:
        patch.setitem(LIMITS, "data.pkl", 9)
        with pytest.raises(CheckpointError, match="data.pkl is longer than 9 bytes"):
            load_checkpoint(path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
        largest = max(archive.filelist, key=lambda info: info.file_size)
        for number in range(copies):  # other names of the same bytes
            other = copy.copy(largest)
            other.filename = f"archive/data/{1000 + number}"
            archive.filelist.append(other)
    for mapped in (False, True):
        with pytest.raises(CheckpointError, match="compressed, or overlap"):
            load_checkpoint(path, mapped)


def test_file_that_would_execute_code_is_refused_and_nothing_runs(tmp_path, shards, capsys):
    class Harmful:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")

    foreign = saved_again(tmp_path, {"step": Harmful()})
    line = refused(run_flags(shards, tmp_path / "run", "--resume", foreign), capsys)
    assert "io.open" in line
    assert not (tmp_path / "harm").exists()


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
        assert "another process is using it" in refused(argv, capsys)
        assert train.command_line([*argv, "--dry_run"]) == 0


# --------------------------------------------------------------------------------------------------
# Values that no run saves

NO_COUNTS = (-1, 1.0, True, "3", None, [1], 1 << 62, 10**400)
NO_NUMBERS = ("x", True, [1.0], 10**400)
BAD_FLAGS = (
    dict(lr=math.nan),
    dict(lr=math.inf),
    dict(lr=torch.ones(2)),
    dict(lr=[1]),
    dict(lr=10**400),
    dict(seq_len=1),
    dict(seq_len="32"),
    dict(seq_len=1 << 25),
    dict(eval_tokens=0),
    dict(eval_tokens=1.5),
    dict(target_tokens=None),
    dict(data_dir=3),
    dict(minutes="x"),
)
BAD_METRICS = (dict(loss="x"), dict(loss=[1]), dict(loss=torch.ones(())), dict(loss=10**400))
BAD_CONFIGS = (
    dict(hidden_size=1 << 40),
    dict(n_loops=10**9),
    dict(dim=3),
    dict(act=1),
    dict(engram_orders=[3, "4"]),
)
BAD_VALUES = {
    "step": NO_COUNTS,
    "bytes_seen": NO_COUNTS,
    "epoch": NO_COUNTS,
    "unimproved": NO_COUNTS,
    "skipped": NO_COUNTS,
    "best_loss": (*NO_NUMBERS, None, math.nan),
    "lowest_peak": (*NO_NUMBERS, None, math.nan),
    "val_loss": (*NO_NUMBERS, math.nan, math.inf),
    "metrics": (*BAD_METRICS, {1: 2.0}, [], "x", 3),
    "recent": (["a"], [None], [math.nan], [math.inf], [10**400], [True], {}, "ab", None, 3),
    "exploded": ("no", 1, None),
    "wandb": (3, {}, {"name": "a"}, {"name": "a", "id": 3}, "a", []),
    "n_loops": (0, -1, 4097, 10**9, 2.0, None),
    "recipe": ("2b", None, [], {}, 3),
    "targets": ([1.0], ["a"], [-1], [None], 3, {}, None, (1,)),
    "shares": (["a"], [None], [math.nan], 3, None),
    "flags": (*BAD_FLAGS, {1: 2}, 3, None, []),
    "cfg": (*BAD_CONFIGS, {1: 2}, [], None, 3),
    "model_state_dict": ([], None, 3),
    "optimizer_state_dict": ([], None, 3),
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_bad_value_is_refused_by_name(trained, key):
    for value in BAD_VALUES[key]:
        with pytest.raises(CheckpointError) as fault:
            check(trained | {key: value})
        line = str(fault.value)
        assert line.startswith("a.pt: ") and len(line) < 200, value
        assert key in line or key == "cfg", (value, line)


def test_every_saved_value_has_a_rule_and_keeps_it(trained):
    saved = {field.name for field in fields(RunProgress)} | {"recipe", "flags", "targets", "shares"}
    assert saved <= checkpoint.RULES.keys()
    check(trained)
    # after a skipped step
    numbers = dict(loss=math.nan, skipped=True, lr=None)
    check(trained | asdict(RunProgress(metrics=numbers, val_loss=2, recent=[1, 2.0])))
    # a weight that has the name of a count
    trained["model_state_dict"]["clock.step"] = torch.tensor([-1.0, 1.0])
    check(trained)


def test_endlessly_nested_values_are_refused(trained):
    endless: dict = {}
    endless["state"] = endless
    deep: dict = {}
    for _ in range(5000):
        deep = dict(state=deep)
    wide: dict = {}
    for _ in range(60):
        wide = dict(a=wide, b=wide)  # 2 ** 60 values in 60 dicts
    for states in (endless, deep, wide):
        with pytest.raises(CheckpointError, match="^a.pt: "):
            check(trained | dict(optimizer_state_dict=states))


# --------------------------------------------------------------------------------------------------
# Tensors that are not what their shapes say

HOSTILE = dict(
    stride_0=lambda t: torch.zeros((), dtype=t.dtype).expand(t.shape),
    transposed=lambda t: torch.stack((t, t), -1).mT,
    of_a_larger_storage=lambda t: torch.stack((t, t))[0],
    behind_an_offset=lambda t: torch.stack((t, t))[1],
    sparse=lambda t: t.to_sparse(),
    rows=lambda t: t.reshape(-1, 1).to_sparse_csr(),
    parameter=lambda t: torch.nn.Parameter(t.float()),
    meta=lambda t: t.to("meta"),
    nested=lambda t: torch.nested.nested_tensor([t.reshape(-1)] * 2),
    quantized=lambda t: torch.quantize_per_tensor(t.float(), 1, 0, torch.qint8),
    conjugate=lambda t: torch.complex(t.float(), t.float()).conj(),
    negative=lambda t: torch.complex(t.float(), t.float()).conj().imag,
)
MISFITS = dict(
    long=lambda t: t.long(),
    bool=lambda t: t.bool(),
    complex=lambda t: t.to(torch.complex64),
    float8=lambda t: t.to(torch.float8_e5m2),
    short=lambda t: t.flatten()[:1].clone(),
    wide=lambda t: t[..., None],
    list=lambda t: [1.0],
    text=lambda t: "3",
    none=lambda t: None,
    dict=lambda t: {},
)
QUIET = pytest.mark.filterwarnings(
    "ignore:.*beta state", "ignore:.*prototype stage", "ignore:.*quantize", "ignore:.*complex"
)


def holders(saved: dict, optimizer: str) -> list[dict]:
    """Return the dicts that hold the tensors of an optimizer's state; 8-bit AdamW nests them."""
    found = []
    for values in saved["optimizer_state_dict"][optimizer]["state"].values():
        found.append(values)
        found += [value for value in values.values() if isinstance(value, dict)]
    return found


def each_change(saved: dict, optimizer: str, changes: dict[str, Callable]) -> Iterator[tuple]:
    """Change one tensor at a time of an optimizer's state, of each key, dtype and number of
    dimensions above 0. Yield its key and the name of the change."""
    seen = set()
    for holder in holders(saved, optimizer):
        for key, value in holder.items():
            if not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            kind = (key, value.ndim, value.dtype)
            if kind in seen:
                continue
            seen.add(kind)
            for name, change in changes.items():
                holder[key] = change(value)
                yield key, name
            holder[key] = value
    assert seen


def optimizers_for(saved: dict, name: str) -> Optimizers:
    return Optimizers(Spider(SpiderConfig.from_saved(saved["cfg"])), name)


def fits(optimizers: Optimizers, saved: dict) -> bool:
    try:
        optimizers.load_state_dict(saved["optimizer_state_dict"])
    except CheckpointError as fault:
        assert "does not fit this model" in str(fault)
        assert len(str(fault)) < 400
        return False
    return True


@QUIET
@pytest.mark.parametrize("optimizer", ("muon", "adamw", "adamw8bit", "engram"))
def test_optimizer_tensor_of_unreliable_shape_or_other_kind_is_refused(trained_by, optimizer):
    """Of a tensor with stride 0, the fused kernels would write far beyond its four bytes."""
    run_by = "muon" if optimizer == "engram" else optimizer
    saved = copy.deepcopy(trained_by[run_by])
    optimizers = optimizers_for(saved, run_by)
    for key, change in each_change(saved, optimizer, HOSTILE):
        with pytest.raises(CheckpointError, match=key):
            check(saved)
        if change != "meta":  # ranks without the file have such tensors
            assert not fits(optimizers, saved), (key, change)
    for key, change in each_change(saved, optimizer, MISFITS):
        assert not fits(optimizers, saved), (key, change)
    check(saved)
    assert fits(optimizers, saved)


@QUIET
@pytest.mark.parametrize("name", ("lm_head.weight", "engram_input.table.multiplier"))
def test_weight_of_unreliable_shape_or_other_kind_is_refused_by_name(trained, name):
    model = Spider(SpiderConfig.from_saved(trained["cfg"]))
    weights = trained["model_state_dict"]
    whole = weights[name]
    for change in HOSTILE.values():
        weights[name] = change(whole)
        with pytest.raises(CheckpointError, match=name):
            check(trained)
    for change in MISFITS.values():
        weights[name] = change(whole)
        if weights[name] is whole:  # `long` of a multiplier, which is int64
            continue
        with pytest.raises(CheckpointError, match=name):
            check_weights(Path("a.pt"), trained, model)
    if whole.dtype == torch.float32:
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            weights[name] = whole.to(dtype)
            check_weights(Path("a.pt"), trained, model)


@pytest.mark.parametrize("optimizer, kind", (("adamw", torch.tensor), ("adamw8bit", float)))
def test_optimizer_step_that_no_run_reaches_is_refused(trained_by, optimizer, kind):
    saved = copy.deepcopy(trained_by[optimizer])
    for step in (-1.0, math.nan, math.inf, 2.0**31):
        holders(saved, optimizer)[0]["step"] = kind(step)
        with pytest.raises(CheckpointError, match="step must be a number from 0"):
            check(saved)
    holders(saved, optimizer)[0]["step"] = kind(0.0)
    check(saved)


@pytest.mark.parametrize(
    "optimizer, key",
    (
        ("adamw", "exp_avg_sq"),
        ("adamw", "step"),
        ("adamw8bit", "state1"),
        ("adamw8bit", "absmax1"),
        ("muon", "momentum_buffer"),
        ("engram", "sum"),
    ),
)
def test_optimizer_state_with_other_keys_or_unknown_parameters_is_refused(
    trained_by, optimizer, key
):
    run_by = "muon" if optimizer == "engram" else optimizer
    optimizers = optimizers_for(trained_by[run_by], run_by)

    def fits_after(change: Callable) -> bool:
        saved = copy.deepcopy(trained_by[run_by])
        by_param = saved["optimizer_state_dict"][optimizer]["state"]
        values = next(holder for holder in holders(saved, optimizer) if key in holder)
        change(by_param, values)
        return fits(optimizers, saved)

    assert fits_after(lambda by_param, values: None)
    assert fits_after(lambda by_param, values: by_param.pop(0))
    assert not fits_after(lambda by_param, values: values.update(other=values.pop(key)))
    assert not fits_after(lambda by_param, values: values.update(more=values[key]))
    assert not fits_after(lambda by_param, values: by_param.update({999: values}))
    assert not fits_after(lambda by_param, values: by_param.update(x=values))
    assert not fits_after(lambda by_param, values: by_param.update({0: [1]}))
    if key not in ("momentum_buffer", "sum"):  # those are the only value
        assert not fits_after(lambda by_param, values: values.pop(key))


def test_optimizer_keeps_its_own_settings_and_refuses_other_groups(trained_by):
    saved = copy.deepcopy(trained_by["adamw"])
    groups = saved["optimizer_state_dict"]["adamw"]["param_groups"]
    groups[0] |= dict(lr=math.nan, betas="x", fused=False, capturable=True, foreign=[1])
    optimizers = optimizers_for(saved, "adamw")

    def settings() -> list[dict]:
        own = optimizers.by_name["adamw"].param_groups
        return [{name: group[name] for name in group if name != "params"} for group in own]

    before = settings()
    optimizers.load_state_dict(saved["optimizer_state_dict"])
    assert settings() == before
    for change in (
        lambda: groups[0]["params"].pop(),
        lambda: groups[0].update(params=["a"]),
        lambda: groups.pop(),
        lambda: groups[0].pop("params"),
        lambda: groups.clear(),
    ):
        change()
        assert not fits(optimizers, saved)
    saved["optimizer_state_dict"]["adamw"] = [1]
    assert not fits(optimizers, saved)


def test_values_that_share_memory_are_refused_except_read_only_tables(tmp_path, trained_by):
    layout = state.state_layouts("adamw8bit", torch.float32, (5, 900))[1]
    assert layout["absmax1"] == "float32 [18]"  # of 4,500 numbers, 256 of each
    # bitsandbytes has such tables: a program may save them
    own = copy.deepcopy(trained_by["adamw8bit"])
    optimizers = optimizers_for(own, "adamw8bit")
    for p in optimizers.dense:
        p.grad = torch.ones_like(p)
    optimizers.by_name["adamw8bit"].step()
    own["optimizer_state_dict"] = optimizers.state_dict()
    assert fits(optimizers, load_checkpoint(saved_again(tmp_path, own)))

    saved = copy.deepcopy(trained_by["adamw"])
    by_param = saved["optimizer_state_dict"]["adamw"]["state"]

    def assert_refused():
        with pytest.raises(CheckpointError, match="shares its memory"):
            load_checkpoint(saved_again(tmp_path, saved))

    for key, other in (("exp_avg_sq", by_param[0]["exp_avg"]), ("step", by_param[1]["step"])):
        whole = by_param[0][key]
        by_param[0][key] = other
        assert_refused()
        by_param[0][key] = whole
    by_param[0] = by_param[1]
    assert_refused()


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
    return CheckpointWriter(directory, saved=[], keep_last=2, keep_best=False, world=World({}))


def save(writer, step, **more):
    writer.save(dict(step=step, exploded=False, val_loss=None) | more, lambda: None)


def test_save_copies_the_state_and_waits_only_for_the_previous_write(tmp_path, monkeypatch):
    weight = torch.zeros(1000)
    writer = writer_in(tmp_path)
    write = checkpoint.write_archive
    may_write = []

    def write_late(file, saved):
        until(lambda: may_write)
        write(file, saved)

    monkeypatch.setattr(checkpoint, "write_archive", write_late)
    save(writer, 1, weight=weight, nested=[dict(part=weight[:3])])
    weight.fill_(7)  # training continues
    assert not (tmp_path / "spider-step1.pt").exists()
    may_write.append(True)
    assert writer.holds(1)
    saved = torch.load(tmp_path / "spider-step1.pt")
    assert not saved["weight"].any()
    assert not saved["nested"][0]["part"].any()

    memory = writer.host_copy["weight"].data_ptr()
    monkeypatch.setattr(checkpoint, "write_archive", lambda *args: (time.sleep(0.2), write(*args)))
    for step in (5, 6):  # the second waits for the first
        weight.fill_(step)
        save(writer, step, weight=weight)
    assert writer.holds(6) and not writer.holds(5)
    assert writer.host_copy["weight"].data_ptr() == memory
    for step in (5, 6):
        assert torch.load(tmp_path / f"spider-step{step}.pt")["weight"][0] == step


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
    assert steps_in(directory) == [2, 8]


def test_disk_that_stays_full_ends_in_status_2_and_keeps_older_checkpoints(
    tmp_path, shards, processes
):
    """The kernel refuses: no file may grow beyond 100 kB, and a checkpoint is larger."""
    directory = run(tmp_path, shards, *NO_EVAL, steps=2)
    before = (directory / "spider-step2.pt").read_bytes()
    argv = run_flags(shards, directory, "--ckpt_every", "4", *NO_EVAL, steps=6)
    status, _, log = forked(processes, tmp_path, *argv, faults=[(file_limit, 0, 100_000)])
    assert status == 2
    assert "resumes from the older checkpoints" in log.splitlines()[-1]
    (line,) = [line for line in log.splitlines() if "CHECKPOINT NOT SAVED" in line][:1]
    assert "File too large" in line
    assert [path.read_bytes() for path in directory.glob("*.pt")] == [before]
    assert not list(directory.glob(".*.tmp"))
    assert len(metrics(directory)) == 6
    resumed = run(tmp_path, shards, *NO_EVAL, steps=6)
    assert_same_runs(resumed, run(tmp_path, shards, *NO_EVAL, steps=6, ckpt="whole"))


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


def test_checkpoints_of_later_steps_do_not_count_as_saved(tmp_path, shards):
    """They are damaged, as a look at their tensors alone shows."""
    directory = run(tmp_path, shards, "--ckpt_every", "1", *NO_EVAL, steps=2)
    flags = train.Flags(ckpt_dir=str(directory))
    for in_place, saved_step in ((True, 1), (False, -1)):
        writer = train.open_writer(flags, RunProgress(step=1), World({}), in_place)
        assert [one.step for one in writer.saved] == [1]
        assert writer.saved_step == saved_step


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
    assert steps_in(directory) == [2, 4]
    path, _ = load_newest(directory)
    assert path == directory / "spider-step4.pt"
    (directory / "spider-step2-mine.pt").unlink()
    run(tmp_path, shards, *flags, steps=5)
    log = capsys.readouterr().err
    assert "spider-step9.pt is renamed: it holds step 2" in log
    assert "spider-step4.pt (step 4)" in log
    assert steps_in_names(directory)[-2:] == [5, 9]
