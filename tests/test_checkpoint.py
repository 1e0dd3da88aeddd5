"""Checkpoints: whole or not there, read without executing anything, and refused by name if they do
not fit."""

import copy
import errno
import math
import os
import random
import time
import warnings
import zipfile
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
    best_checkpoint,
    check_state,
    check_weights,
    find_checkpoints,
    load_checkpoint,
    load_newest,
)
from spider.common import CheckpointError, locked
from spider.config import SpiderConfig
from spider.distributed import World
from spider.machine import start_log
from spider.optim import Optimizers
from spider.run import Metrics, RunProgress
from spider_model import Spider

OPTIMIZERS = (("adamw", "exp_avg_sq"), ("adamw8bit", "state1"), ("muon", "momentum_buffer"))


@pytest.fixture(scope="module")
def trained_by(tmp_path_factory) -> dict:
    """States of checkpoints after one step, by optimizer."""
    root = tmp_path_factory.mktemp("trained_by")
    shards = make_shards(root / "data")
    return {
        name: final_state(
            run(root, shards, "--optimizer", name, "--eval_every", "0", steps=1, ckpt=name)
        )
        for name, _ in OPTIMIZERS
    }


@pytest.fixture
def trained(trained_by) -> dict:
    return copy.deepcopy(trained_by["muon"])


def steps_in(directory) -> list[int]:
    return [one.step for one in find_checkpoints(directory)]


# --------------------------------------------------------------------------------------------------
# Contents


def test_a_checkpoint_has_the_keys_of_the_contract_and_only_plain_values(trained):
    assert {
        "model_state_dict",
        "optimizer_state_dict",
        "step",
        "epoch",
        "cfg",
        "best_loss",
    } <= trained.keys()
    assert (
        trained["step"] == 1 and trained["cfg"]["hidden_size"] == 32 and trained["recipe"] == "tiny"
    )

    def walk(value):
        if isinstance(value, dict):
            assert all(type(name) in (str, int) for name in value)
            value = list(value.values())
        for entry in value if isinstance(value, (list, tuple)) else ():
            walk(entry)
        assert value is None or isinstance(
            value, (list, tuple, torch.Tensor, str, int, float, bool)
        ), value

    walk(trained)


# --------------------------------------------------------------------------------------------------
# Damaged, foreign, of another model


def test_a_file_with_an_altered_byte_or_a_missing_end_is_refused_or_holds_the_same_state(
    tmp_path, shards
):
    path = run(tmp_path, shards, "--eval_every", "0", steps=1) / "spider-step1.pt"
    content, state, refusals = path.read_bytes(), load_checkpoint(path), 0
    # of a weight's record
    size, entry = len(content), content.rindex(b"PK\1\2", 0, content.rindex(b"/data/0"))
    random_bits = [(place, place % 8) for place in random.Random(0).sample(range(size), 60)]
    of_headers = [(place, place % 8) for place in (*range(8), *range(size - 90, size))]
    for place, bit in (*random_bits, *of_headers, *((entry + 38, bit) for bit in range(8))):
        path.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
        )
        try:
            assert_same(load_checkpoint(path), state)  # such as a byte of padding
        except CheckpointError:
            refusals += 1
    assert refusals > 80
    for length in (0, 1, 30, size // 2, size - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_a_file_whose_records_have_more_bytes_than_it_has_is_refused(tmp_path):
    path = saved_again(tmp_path, dict(step=1, weight=torch.zeros(100_000)))
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    for compression, copies in ((zipfile.ZIP_DEFLATED, 0), (zipfile.ZIP_STORED, 9)):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in records.items():
                archive.writestr(name, content)
            largest = max(archive.filelist, key=lambda info: info.file_size)
            for number in range(copies):  # other names of the same bytes
                archive.filelist.append(copy.copy(largest))
                archive.filelist[-1].filename = f"archive/data/{1000 + number}"
        with pytest.raises(CheckpointError, match="compressed, or overlap"):
            load_checkpoint(path)


def test_a_run_whose_weights_are_not_those_of_its_model_is_not_resumed(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=1)
    state = final_state(directory)
    state["model_state_dict"]["lm_head.weight"] = state["model_state_dict"]["lm_head.weight"][
        1:
    ].clone()
    torch.save(state, directory / "spider-step1.pt")
    assert "lm_head.weight" in refused(run_flags(shards, directory), capsys)


def test_a_directory_in_use_is_refused_but_not_for_a_dry_run(tmp_path, shards, capsys):
    with locked(tmp_path):
        assert "another process is using it" in refused(run_flags(shards, tmp_path), capsys)
        assert train.command_line([*run_flags(shards, tmp_path), "--dry_run"]) == 0


def test_a_damaged_newest_checkpoint_is_skipped_and_the_run_still_ends_exactly(
    tmp_path, shards, capsys
):
    whole = run(tmp_path, shards, "--ckpt_every", "3", steps=6, ckpt="whole")
    directory = run(tmp_path, shards, "--ckpt_every", "3", steps=6)
    for damage in (
        lambda c: c[: len(c) // 2],
        lambda c: c[:5000] + bytes([c[5000] ^ 1]) + c[5001:],
        lambda c: b"",
    ):
        newest = directory / "spider-step6.pt"
        newest.write_bytes(damage(newest.read_bytes()))
        run(tmp_path, shards, "--ckpt_every", "3", steps=6)
        said = capsys.readouterr().err
        assert f"skipped: {newest}" in said and f"resuming from {directory}/spider-step3.pt" in said
        assert_same_runs(directory, whole)


def test_a_directory_of_damaged_checkpoints_alone_is_refused_and_left_unchanged(
    tmp_path, shards, capsys
):
    directory = run(tmp_path, shards, steps=3)
    (directory / "spider-step3.pt").write_bytes(b"no checkpoint")
    os.mkfifo(directory / "spider-step4.pt")
    (directory / "spider-step5.pt").symlink_to("/dev/zero")
    lines = (directory / "metrics.jsonl").read_bytes()
    assert "none of the checkpoints" in refused(run_flags(shards, directory), capsys)
    assert (directory / "metrics.jsonl").read_bytes() == lines
    assert (directory / "spider-step3.pt").read_bytes() == b"no checkpoint"


def test_a_checkpoint_that_would_execute_something_is_refused_and_nothing_runs(
    tmp_path, shards, capsys
):
    class Harmful:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")

    torch.save({"step": Harmful()}, tmp_path / "foreign.pt")
    line = refused(run_flags(shards, tmp_path / "run", "--resume", tmp_path / "foreign.pt"), capsys)
    assert not (tmp_path / "harm").exists() and "io.open" in line


@pytest.mark.parametrize(
    "change, complaint",
    (
        (dict(cfg={"dim": 3}), "unexpected keyword"),
        (dict(cfg=None), "cfg must be"),
        (dict(cfg={"act": 1}), "act"),
        (dict(cfg={"engram_orders": [3, "4"]}), "engram_orders"),
        (dict(model_state_dict={}), "weights do not match"),
        (dict(step="3"), "step must be"),
        (dict(best_loss="x"), "best_loss must be"),
    ),
    ids=lambda value: str(value)[:30],
)
def test_a_state_that_no_run_saved_is_refused_in_a_line(
    tmp_path, trained, shards, change, complaint, capsys
):
    torch.save(trained | change, tmp_path / "foreign.pt")
    argv = run_flags(shards, tmp_path / "new", "--resume", tmp_path / "foreign.pt")
    assert complaint in refused(argv, capsys) and not list((tmp_path / "new").glob("*.pt"))


NO_COUNTS = (-1, 1.0, True, "3", None, [1], 1 << 62, 10**400)
NO_NUMBERS = ("x", True, [1.0], 10**400)
BAD_VALUES = {
    "step": NO_COUNTS,
    "bytes_seen": NO_COUNTS,
    "epoch": NO_COUNTS,
    "unimproved": NO_COUNTS,
    "skipped": NO_COUNTS,
    "best_loss": (*NO_NUMBERS, None, math.nan),
    "lowest_peak": (*NO_NUMBERS, None, math.nan),
    "val_loss": (*NO_NUMBERS, math.nan, math.inf),
    "metrics": (
        {"loss": "x"},
        {"loss": [1]},
        {"loss": torch.ones(())},
        {1: 2.0},
        {"loss": 10**400},
        [],
        "x",
        3,
    ),
    "recent": (["a"], [None], [math.nan], [math.inf], [10**400], [True], {}, "ab", None, 3),
    "exploded": ("no", 1, None),
    "wandb": (3, {}, {"name": "a"}, {"name": "a", "id": 3}, "a", []),
    "n_loops": (0, -1, 4097, 10**9, 2.0, None),
    "recipe": ("2b", None, [], {}, 3),
    "targets": ([1.0], ["a"], [-1], [None], 3, {}, None, (1,)),
    "shares": (["a"], [None], [math.nan], 3, None),
    "flags": (
        3,
        None,
        [],
        {1: 2},
        {"lr": math.nan},
        {"lr": math.inf},
        {"lr": torch.ones(2)},
        {"lr": [1]},
        {"lr": 10**400},
        {"seq_len": 1},
        {"seq_len": "32"},
        {"seq_len": 1 << 25},
        {"eval_tokens": 0},
        {"eval_tokens": 1.5},
        {"target_tokens": None},
        {"data_dir": 3},
        {"minutes": "x"},
    ),
    "cfg": ([], 3, {"hidden_size": 1 << 40}, {"n_loops": 10**9}, {1: 2}),
    "model_state_dict": ([], None, 3),
    "optimizer_state_dict": ([], None, 3),
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_values_that_no_run_saves_are_refused_by_name(trained, key):
    for value in BAD_VALUES[key]:
        with pytest.raises(CheckpointError) as fault:
            check_state(Path("a.pt"), trained | {key: value}, REQUIRED)
        line = str(fault.value)
        assert line.startswith("a.pt: ") and (key in line or key == "cfg") and len(line) < 200, (
            value,
            line,
        )


def test_every_value_of_a_run_has_a_rule_and_keeps_it(trained):
    """Also one whose numbers are not finite, as after skipped steps, and a weight that is called
    like a count."""
    saved = {field.name for field in fields(RunProgress)} | {"recipe", "flags", "targets", "shares"}
    assert saved <= checkpoint.RULES.keys()
    check_state(Path("a.pt"), trained, REQUIRED)
    check_state(
        Path("a.pt"),
        trained
        | asdict(
            RunProgress(
                metrics=dict(loss=math.nan, skipped=True, lr=None), val_loss=2, recent=[1, 2.0]
            )
        ),
        REQUIRED,
    )
    trained["model_state_dict"]["clock.step"] = torch.tensor([-1.0, 1.0])
    check_state(Path("a.pt"), trained, REQUIRED)


def test_values_nested_without_end_are_refused_in_a_line(tmp_path, trained):
    endless, deep, wide = {}, {}, {}
    endless["state"] = endless
    for _ in range(5000):
        deep = dict(state=deep)
    for _ in range(60):
        wide = dict(a=wide, b=wide)  # 2 ** 60 values in 60 dicts
    for states in (endless, deep, wide):
        with pytest.raises(CheckpointError, match="^a.pt: "):
            check_state(Path("a.pt"), trained | dict(optimizer_state_dict=states), REQUIRED)


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
OTHER_DTYPES = dict(
    long=lambda t: t.long(),
    bool=lambda t: t.bool(),
    complex=lambda t: t.to(torch.complex64),
    eight=lambda t: t.to(torch.float8_e5m2),
)
OTHER_VALUES = dict(
    short=lambda t: t.flatten()[:1].clone(),
    wide=lambda t: t[..., None],
    list=lambda t: [1.0],
    text=lambda t: "3",
    nothing=lambda t: None,
    dict=lambda t: {},
)
BAD_STEPS = dict(negative=-1.0, nan=math.nan, endless=math.inf, huge=2.0**31)


def saved_again(tmp_path, state: dict) -> Path:
    with warnings.catch_warnings():  # torch's, of layouts in beta
        warnings.simplefilter("ignore")
        torch.save(state, tmp_path / "foreign.pt")
    return tmp_path / "foreign.pt"


def holders(state: dict, optimizer: str) -> list[dict]:
    """The dicts that hold the tensors of an optimizer's state; those of bitsandbytes are nested."""
    states = state["optimizer_state_dict"][optimizer]["state"].values()
    return [part for one in states for part in (one, *one.values()) if isinstance(part, dict)]


def damaged(state: dict, optimizer: str, damage: dict):
    """Yield the key and the name of each damage while a tensor of the optimizer's state has it: one
    tensor of each key, dtype and number of dimensions above 0."""
    seen = set()
    for holder in holders(state, optimizer):
        for key, value in holder.items():
            if (
                not isinstance(value, torch.Tensor)
                or not value.ndim
                or (key, value.ndim, value.dtype) in seen
            ):
                continue
            seen.add((key, value.ndim, value.dtype))
            for name, change in damage.items():
                holder[key] = change(value)
                yield key, name
            holder[key] = value
    assert seen


def optimizers_for(state: dict, name: str) -> Optimizers:
    return Optimizers(Spider(SpiderConfig.from_saved(state["cfg"])), name)


def fits(optimizers: Optimizers, state: dict) -> bool:
    try:
        optimizers.load_state_dict(state["optimizer_state_dict"])
    except CheckpointError as fault:
        assert "does not fit this model" in str(fault) and len(str(fault)) < 400
        return False
    return True


@pytest.mark.filterwarnings(
    "ignore:.*beta state", "ignore:.*prototype stage", "ignore:.*quantize", "ignore:.*complex"
)
@pytest.mark.parametrize("optimizer", ("muon", "adamw", "adamw8bit", "engram"))
def test_optimizer_states_whose_shapes_a_kernel_cannot_rely_on_are_refused(trained_by, optimizer):
    """Of a tensor with stride 0, the fused kernels would write far beyond its four bytes."""
    whole = "muon" if optimizer == "engram" else optimizer
    state = copy.deepcopy(trained_by[whole])
    optimizers = optimizers_for(state, whole)
    for key, name in damaged(state, optimizer, HOSTILE):
        with pytest.raises(CheckpointError, match=key):
            check_state(Path("a.pt"), state, REQUIRED)
        if name != "meta":  # what ranks without the file have
            assert not fits(optimizers, state), (key, name)
    for key, name in damaged(state, optimizer, OTHER_DTYPES | OTHER_VALUES):
        assert not fits(optimizers, state), (key, name)
    check_state(Path("a.pt"), state, REQUIRED)
    assert fits(optimizers, state)


@pytest.mark.parametrize(
    "damage", (lambda t: torch.zeros(()).expand(t.shape), lambda t: t.to_sparse())
)
def test_a_file_with_such_a_tensor_is_refused_by_name(tmp_path, trained, damage):
    for holder, key in (
        (trained["model_state_dict"], "null_segment"),
        (holders(trained, "adamw")[0], "exp_avg"),
    ):
        whole = holder[key]
        holder[key] = damage(whole)
        with pytest.raises(
            CheckpointError, match=f"foreign.pt.*({key} must be a dense|not defined for sparse)"
        ):
            load_checkpoint(saved_again(tmp_path, trained))
        holder[key] = whole


@pytest.mark.parametrize("damage", BAD_STEPS)
def test_steps_of_an_optimizer_that_no_run_reaches_are_refused(trained_by, damage):
    for optimizer, make in (("adamw", torch.tensor), ("adamw8bit", float)):
        state = copy.deepcopy(trained_by[optimizer])
        next(iter(state["optimizer_state_dict"][optimizer]["state"].values()))["step"] = make(
            BAD_STEPS[damage]
        )
        with pytest.raises(CheckpointError, match="step must be a number from 0"):
            check_state(Path("a.pt"), state, REQUIRED)


@pytest.mark.parametrize(
    "optimizer, key", (*OPTIMIZERS, ("engram", "sum"), ("adamw", "step"), ("adamw8bit", "absmax1"))
)
def test_optimizer_states_with_other_keys_or_of_unknown_parameters_are_refused(
    trained_by, optimizer, key
):
    whole = "muon" if optimizer == "engram" else optimizer
    optimizers = optimizers_for(trained_by[whole], whole)

    def changed(change) -> bool:
        state = copy.deepcopy(trained_by[whole])
        change(
            state["optimizer_state_dict"][optimizer]["state"],
            next(holder for holder in holders(state, optimizer) if key in holder),
        )
        return fits(optimizers, state)

    assert changed(lambda states, held: None) and changed(lambda states, held: states.pop(0))
    assert not changed(lambda states, held: held.update(other=held.pop(key)))
    assert not changed(lambda states, held: held.update(more=held[key]))
    assert not changed(lambda states, held: states.update({999: held}))
    assert not changed(lambda states, held: states.update(x=held))
    assert not changed(lambda states, held: states.update({0: [1]}))
    # its only value
    assert key in ("momentum_buffer", "sum") or not changed(lambda states, held: held.pop(key))


def test_settings_of_a_checkpoints_optimizer_are_not_taken_and_other_groups_are_refused(trained_by):
    state = copy.deepcopy(trained_by["adamw"])
    model = Spider(SpiderConfig.from_saved(state["cfg"]))
    groups = state["optimizer_state_dict"]["adamw"]["param_groups"]
    groups[0] |= dict(
        lr=math.nan, betas="x", fused=False, capturable=True, weight_decay=None, foreign=[1]
    )
    optimizers = Optimizers(model, "adamw", lr=0.1)
    wanted = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizers.by_name["adamw"].param_groups
    ]
    optimizers.load_state_dict(state["optimizer_state_dict"])
    assert [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizers.by_name["adamw"].param_groups
    ] == wanted
    for change in (
        lambda: groups[0]["params"].pop(),
        lambda: groups[0].update(params=["a"]),
        lambda: groups.pop(),
        lambda: groups[0].pop("params"),
        lambda: groups.clear(),
    ):
        change()
        assert not fits(optimizers, state)
    state["optimizer_state_dict"]["adamw"] = [1]
    assert not fits(optimizers, state)


def test_values_that_share_their_memory_are_refused_but_for_tables_that_are_only_read(
    tmp_path, trained_by
):
    """As bitsandbytes has them, where a program saves its own state."""
    model = Spider(SpiderConfig.from_saved(trained_by["adamw8bit"]["cfg"]))
    optimizers = Optimizers(model, "adamw8bit")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizers.by_name["adamw8bit"].step()
    own = trained_by["adamw8bit"] | dict(optimizer_state_dict=optimizers.state_dict())
    assert fits(optimizers, load_checkpoint(saved_again(tmp_path, own)))
    state = copy.deepcopy(trained_by["adamw"])
    states = state["optimizer_state_dict"]["adamw"]["state"]
    for key, other in (("exp_avg_sq", states[0]["exp_avg"]), ("step", states[1]["step"])):
        whole, states[0][key] = states[0][key], other
        with pytest.raises(CheckpointError, match="shares its memory"):
            load_checkpoint(saved_again(tmp_path, state))
        states[0][key] = whole
    states[0] = states[1]
    with pytest.raises(CheckpointError, match="shares its memory"):
        load_checkpoint(saved_again(tmp_path, state))


@pytest.mark.filterwarnings(
    "ignore:.*beta state", "ignore:.*prototype stage", "ignore:.*quantize", "ignore:.*complex"
)
@pytest.mark.parametrize("name", ("lm_head.weight", "engram_input.table.multiplier"))
def test_weights_that_are_not_what_their_shapes_say_are_refused_by_name(trained, name):
    weights = trained["model_state_dict"]
    whole = weights[name]
    for change in HOSTILE.values():
        weights[name] = change(whole)
        with pytest.raises(CheckpointError, match=name):
            check_state(Path("a.pt"), trained, REQUIRED)
    for change in (OTHER_DTYPES | OTHER_VALUES).values():
        weights[name] = change(whole)
        if weights[name] is not whole:  # which is of 64 bits
            with pytest.raises(CheckpointError, match=name):
                check_weights(Path("a.pt"), trained, Spider)
    for dtype in (
        (torch.float64, torch.float16, torch.bfloat16) if whole.dtype == torch.float32 else ()
    ):
        weights[name] = whole.to(dtype)
        check_weights(Path("a.pt"), trained, Spider)


@pytest.mark.parametrize(
    "damage", (lambda w: w.int(), lambda w: w[:1].clone(), lambda w: None, lambda w: w[None])
)
def test_weights_of_another_shape_or_kind_are_refused_by_name(tmp_path, trained, damage):
    weights = trained["model_state_dict"]
    weights["lm_head.weight"] = damage(weights["lm_head.weight"])
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        check_weights(Path("foreign.pt"), load_checkpoint(saved_again(tmp_path, trained)), Spider)


@pytest.mark.parametrize("optimizer, key", OPTIMIZERS)
def test_optimizer_state_of_another_size_is_refused_before_a_kernel_reads_it(
    tmp_path, trained_by, shards, capsys, optimizer, key
):
    state = copy.deepcopy(trained_by[optimizer])
    held = next(
        part
        for one in state["optimizer_state_dict"][optimizer]["state"].values()
        for part in (one, *one.values())
        if isinstance(part, dict) and key in part
    )
    held[key] = held[key].flatten()[:2].clone()
    torch.save(state, tmp_path / "other.pt")
    argv = run_flags(
        shards, tmp_path / "new", "--optimizer", optimizer, "--resume", tmp_path / "other.pt"
    )
    assert f"state of {optimizer} does not fit this model" in refused(argv, capsys)


def test_another_optimizer_than_the_checkpoints_is_refused_by_name(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, "--optimizer", "adamw", steps=1)
    before = {path: path.read_bytes() for path in directory.glob("*.pt")}
    line = refused(run_flags(shards, directory, "--optimizer", "muon"), capsys)
    assert "adamw, engram" in line and "muon, adamw, engram" in line
    assert {path: path.read_bytes() for path in directory.glob("*.pt")} == before


@pytest.mark.parametrize("flags", ((), ("--reset_steps",)))
def test_another_model_than_the_checkpoints_is_refused_with_the_fields_that_differ(
    tmp_path, shards, flags, capsys
):
    origin = run(tmp_path, shards, steps=1) / "spider-step1.pt"
    for setting, named in (
        ("hidden_size=64", "hidden_size is 32, not 64"),
        ("act_threshold=0.5,segment_offsets=3", "segment_offsets is 1, not 3"),
        ("boundaries=words", "boundaries is flexitokens, not words"),
    ):
        argv = run_flags(shards, tmp_path / "new", "--resume", origin, *flags, "--set", setting)
        assert named in refused(argv, capsys)
    argv = [
        "--data_dir",
        shards,
        "--ckpt_dir",
        tmp_path / "new",
        "--resume",
        origin,
        *flags,
        "--model",
        "small",
    ]
    assert "hidden_size is 32, not 256; " in refused(argv, capsys)


# --------------------------------------------------------------------------------------------------
# Writing


def writer_in(directory, keep_last=2, keep_best=False) -> CheckpointWriter:
    return CheckpointWriter(directory, [], keep_last, keep_best, World({}))


def save(writer, step, **more):
    writer.save(dict(step=step, exploded=False, val_loss=None) | more, lambda: None)


def test_a_save_waits_for_the_copy_alone_and_holds_the_state_of_its_own_step(tmp_path, monkeypatch):
    weight, writer, release, write = (
        torch.zeros(1000),
        writer_in(tmp_path),
        [],
        checkpoint.write_archive,
    )

    def held_up(file, state):
        until(lambda: release)
        write(file, state)

    monkeypatch.setattr(checkpoint, "write_archive", held_up)
    save(writer, 1, weight=weight, nested=[dict(t=weight[:3])])
    weight.fill_(7)  # training continues
    assert not (tmp_path / "spider-step1.pt").exists()
    release.append(True)
    assert writer.holds(1)
    state = torch.load(tmp_path / "spider-step1.pt")
    assert not state["weight"].any() and not state["nested"][0]["t"].any()
    memory = writer.copy["weight"].data_ptr()
    monkeypatch.setattr(checkpoint, "write_archive", lambda *args: (time.sleep(0.2), write(*args)))
    for step in (5, 6):  # the second waits for the first
        weight.fill_(step)
        save(writer, step, weight=weight)
    assert writer.holds(6) and not writer.holds(5) and writer.copy["weight"].data_ptr() == memory
    assert [torch.load(tmp_path / f"spider-step{n}.pt")["weight"][0].item() for n in (5, 6)] == [
        5,
        6,
    ]


def test_a_save_waits_for_the_gpus_copies_before_it_writes_them(tmp_path, monkeypatch):
    """A stand-in for pinned memory, into which a copy ends when the host waits for it."""
    writer, begun = writer_in(tmp_path), []

    def host_buffer(shape, *_):
        buffer = torch.zeros(shape)

        def copy_(value, non_blocking):
            begun.append((buffer, value))
            return buffer

        return SimpleNamespace(copy_=copy_)

    def synchronize():
        writer.thread.submit(int).result()  # a write that had begun would end before
        for buffer, value in begun:
            buffer.copy_(value)

    monkeypatch.setattr(state, "host_buffer", host_buffer)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    save(writer, 1, weight=torch.ones(3))
    assert writer.holds(1) and torch.load(tmp_path / "spider-step1.pt")["weight"].tolist() == [
        1,
        1,
        1,
    ]


def test_what_a_killed_process_left_half_written_is_deleted_where_possible(tmp_path, capsys):
    """A directory stands for a file that cannot be deleted."""
    for name in (
        "spider-step7.pt.0a1b.tmp",
        "spider-step7.pt.tmp",
        "metrics.jsonl.0a1b.tmp",
        "curves.png.0a1b.tmp",
    ):
        (tmp_path / f".{name}").touch()
    kept = {"spider-step5.pt", ".look.html.0a1b.tmp"}  # another process may be writing the page
    for name in kept:
        (tmp_path / name).touch()
    kept.add(".spider-step6.pt.0a1b.tmp")
    (tmp_path / ".spider-step6.pt.0a1b.tmp").mkdir()
    writer_in(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert capsys.readouterr().err.count("cannot be deleted") == 1


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_line_and_later_saves_succeed(
    tmp_path, capsys
):
    """A directory stands for it, since root may delete any file."""
    start_log()
    writer = writer_in(tmp_path)
    save(writer, 1)
    assert writer.holds(1)
    (tmp_path / "spider-step1.pt").unlink()
    (tmp_path / "spider-step1.pt").mkdir()
    for step in (2, 3, 4, 5):
        save(writer, step)
        assert writer.holds(step)
    assert capsys.readouterr().err.count("cannot be deleted") == 1
    assert steps_in_names(tmp_path) == [1, 4, 5]


def test_the_last_two_checkpoints_that_had_not_exploded_are_kept_beside_the_newest(tmp_path):
    writer, kept = writer_in(tmp_path), []
    for step, exploded in enumerate((False, False, True, True, True, False, False), 1):
        save(writer, step, exploded=exploded)
        writer.holds(step)
        kept.append(steps_in_names(tmp_path))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 4, 5], [2, 5, 6], [6, 7]]


def steps_in_names(directory) -> list[int]:
    return sorted(int(path.stem[11:]) for path in directory.glob("spider-step*.pt"))


def test_metrics_are_on_the_disk_before_a_checkpoint_takes_its_name(tmp_path, shards, monkeypatch):
    """Else a power loss could leave a checkpoint whose lines are missing."""
    order = []

    def name_of(descriptor):
        return os.path.basename(os.readlink(f"/dev/fd/{descriptor}"))

    monkeypatch.setattr(
        Metrics,
        "write",
        lambda self, line, write=Metrics.write: order.append("line") or write(self, line),
    )
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor, fsync=os.fsync: order.append(name_of(descriptor)) or fsync(descriptor),
    )
    monkeypatch.setattr(
        os,
        "replace",
        lambda old, new, replace=os.replace: (
            order.append(f"named {os.path.basename(new)}") or replace(old, new)
        ),
    )
    directory = run(tmp_path, shards, "--eval_every", "0", steps=2)
    end = order.index("named spider-step2.pt")
    written = max(i for i, event in enumerate(order) if event == "line")
    assert order[written : end - 1] == ["line", "metrics.jsonl"] and order[end - 1].startswith(
        ".spider-step2.pt."
    )
    assert order[end + 1] == directory.name


def test_a_full_disk_is_one_line_and_a_later_save_succeeds(tmp_path, shards, monkeypatch, capsys):
    directory = run(tmp_path, shards, steps=2)
    before, write, calls = (
        (directory / "spider-step2.pt").read_bytes(),
        checkpoint.write_archive,
        [],
    )

    def full(file, state):
        calls.append(state["step"])
        if len(calls) == 1:
            file.write(b"a part of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, state)

    monkeypatch.setattr(checkpoint, "write_archive", full)
    run(tmp_path, shards, "--ckpt_every", "4", "--keep_last", "9", steps=8)
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if "CHECKPOINT NOT SAVED" in line
    ]
    assert "No space left on device" in line and calls == [4, 8]
    assert steps_in(directory) == [2, 8] and not list(directory.glob(".*.tmp"))
    assert (directory / "spider-step2.pt").read_bytes() == before


def test_a_disk_that_stays_full_ends_in_status_2_with_the_older_checkpoints_intact(
    tmp_path, shards, processes
):
    """The kernel refuses: no file may grow beyond 100 kB, and a checkpoint is larger."""
    directory = run(tmp_path, shards, "--eval_every", "0", steps=2)
    before = (directory / "spider-step2.pt").read_bytes()
    argv = run_flags(shards, directory, "--ckpt_every", "4", "--eval_every", "0", steps=6)
    status, _, log = forked(processes, tmp_path, *argv, faults=[(file_limit, 0, 100_000)])
    assert status == 2 and "older checkpoints are intact" in log.splitlines()[-1]
    assert any(
        "CHECKPOINT NOT SAVED" in line and "File too large" in line for line in log.splitlines()
    )
    assert [path.read_bytes() for path in directory.glob("*.pt")] == [before] and not list(
        directory.glob(".*.tmp")
    )
    assert len(metrics(directory)) == 6
    flags = ("--eval_every", "0")
    assert_same_runs(
        run(tmp_path, shards, *flags, steps=6), run(tmp_path, shards, *flags, steps=6, ckpt="whole")
    )


# --------------------------------------------------------------------------------------------------
# Which are kept

BEST = ("--eval_every", "2", "--ckpt_every", "3", "--keep_best")


def test_the_checkpoint_of_the_lowest_validation_loss_stays_beside_the_newest(
    tmp_path, shards, losses
):
    """Steps 4 and 10 are the best so far, and no multiples of --ckpt_every; wherever the run was
    cut, it is known."""
    for steps in (5, 9, 12, 18):
        directory = run(tmp_path, shards, *BEST, steps=steps)
        assert best_checkpoint(directory).step == (4 if steps < 10 else 10)
    assert steps_in_names(directory) == [10, 15, 18] and best_checkpoint(directory).val_loss == 1.0


def test_without_keep_best_the_best_of_the_newest_is_found(tmp_path, shards, losses):
    directory = run(tmp_path, shards, *BEST[:-1], steps=18)
    assert steps_in_names(directory) == [15, 18] and best_checkpoint(directory).step == 18
    with pytest.raises(CheckpointError, match="no checkpoint in it was saved after an evaluation"):
        best_checkpoint(run(tmp_path, shards, "--eval_every", "0", steps=3, ckpt="other"))


def test_a_copy_under_another_step_is_not_taken_for_a_checkpoint_of_that_step(
    tmp_path, shards, capsys
):
    directory = run(tmp_path, shards, "--eval_every", "0", steps=2)
    (directory / "spider-step1.pt").write_bytes((directory / "spider-step2.pt").read_bytes())
    (directory / "spider-step2-mine.pt").write_bytes((directory / "spider-step2.pt").read_bytes())
    assert steps_in(directory) == [2]


def test_a_checkpoint_renamed_to_a_later_step_is_not_the_newest(tmp_path, shards, capsys):
    """Else every restart would go back to it."""
    directory = run(tmp_path, shards, "--eval_every", "0", "--ckpt_every", "2", steps=4)
    (directory / "spider-step9.pt").write_bytes((directory / "spider-step2.pt").read_bytes())
    assert (
        steps_in(directory) == [2, 4] and load_newest(directory)[0] == directory / "spider-step4.pt"
    )
    run(tmp_path, shards, "--eval_every", "0", "--ckpt_every", "2", steps=5)
    said = capsys.readouterr().err
    assert (
        "spider-step9.pt is renamed: it holds step 2" in said and "spider-step4.pt (step 4)" in said
    )
    assert steps_in_names(directory)[-2:] == [5, 9]
