"""Altered files and strangers' files: noticed, refused by name, and nothing of them is executed."""

import copy
import random
import zipfile
from collections import OrderedDict

import pytest
import torch
from conftest import final_state, make_shards, run, run_flags
from runs import trained  # noqa: F401

import train
from spider.errors import CheckpointError
from spider.training import checkpoint_format
from spider.training.checkpoint_loading import load_checkpoint
from spider_model import Spider


def test_a_single_altered_byte_anywhere_in_a_checkpoint_is_noticed(tmp_path, shards):
    path = run(tmp_path, shards, steps=1) / "spider-step1.pt"
    content = bytearray(path.read_bytes())
    checkpoint_format.check_seal(path)
    places = {*random.Random(0).sample(range(len(content)), 300), *range(64), *range(len(content) - 200, len(content))}
    for place in places:
        flip = 1 << place % 8
        content[place] ^= flip
        path.write_bytes(content)
        content[place] ^= flip
        with pytest.raises(ValueError, match="checksum"):
            checkpoint_format.check_seal(path)
    for length in (0, 1, 30, len(content) // 2, len(content) - 1, len(content) - 79):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError):
            checkpoint_format.check_seal(path)


def optimizer_states(state, optimizer, key) -> list[dict]:
    """The dicts in a checkpoint that hold a key of an optimizer's state."""
    return [part for one in state["optimizer_state_dict"][optimizer]["state"].values()
            for part in (one, *one.values()) if isinstance(part, dict) and key in part]


OPTIMIZERS = (("adamw", "exp_avg_sq"), ("adamw8bit", "state1"), ("muon", "momentum_buffer"))


@pytest.fixture(scope="module")
def trained_by(tmp_path_factory):
    """States of checkpoints after one step, by optimizer."""
    root = tmp_path_factory.mktemp("trained_by")
    shards = make_shards(root / "data")
    return {name: final_state(run(root, shards, "--optimizer", name, steps=1, ckpt=name)) for name, _ in OPTIMIZERS}


@pytest.mark.parametrize("optimizer,key", OPTIMIZERS)
def test_optimizer_state_of_another_size_is_refused_before_a_kernel_reads_it(tmp_path, trained_by, shards, capsys,
                                                                             optimizer, key):
    state = copy.deepcopy(trained_by[optimizer])
    held = optimizer_states(state, optimizer, key)[0]
    whole = held[key]
    for change in (lambda t: t.flatten()[:2].clone(), lambda t: t[..., None]):
        held[key] = change(whole)
        torch.save(state, tmp_path / "other.pt")
        argv = run_flags(shards, tmp_path / "new", "--optimizer", optimizer, "--resume", str(tmp_path / "other.pt"))
        assert train.command_line(argv) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "does not fit this model" in said and key in said


class Rebuilt:
    """Saved as what torch makes of a tensor's storage by any offset, shape and stride."""
    def __init__(self, tensor, offset, shape, stride):
        self.parts = tensor._typed_storage(), offset, tuple(shape), tuple(stride), False, OrderedDict()

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.parts


HOSTILE = dict(
    stride_0=lambda t: Rebuilt(t.flatten()[:1].clone(), 0, (*t.shape, 2), (0,) * t.ndim + (0,)),
    transposed=lambda t: torch.stack([torch.stack((t, t), -1)] * 2, -1).mT,
    in_a_larger_storage=lambda t: torch.stack((t, t))[0],
    behind_an_offset=lambda t: torch.stack((t, t))[1],
    sparse=lambda t: t.to_sparse(), parameter=lambda t: torch.nn.Parameter(t.float()), meta=lambda t: t.to("meta"),
    long=lambda t: t.long(), bool=lambda t: t.bool(), complex=lambda t: t.to(torch.complex64),
    list=lambda t: [1.0], fraction=lambda t: 1.5, below_0=lambda t: -1, huge=lambda t: 1 << 64, text=lambda t: "3",
    nothing=lambda t: None)


OTHER_PRECISION = dict(double=lambda t: t.double(), half=lambda t: t.half())


@pytest.mark.parametrize("optimizer,key", (*OPTIMIZERS, ("engram", "sum"), ("adamw", "step"), ("adamw8bit", "state2"),
                                           ("adamw8bit", "step"), ("adamw8bit", "absmax1")))
def test_optimizer_state_that_is_no_plain_tensor_of_its_type_is_refused_by_name(tmp_path, trained_by, optimizer, key):
    """Fused kernels write where such a tensor has no memory."""
    state = copy.deepcopy(trained_by[optimizer if optimizer in trained_by else "muon"])
    for held in optimizer_states(state, optimizer, key)[:2]:              # 8 bits, and what is too small for them
        whole = held[key]
        for name, hostile in (HOSTILE | OTHER_PRECISION).items():
            held[key] = hostile(torch.as_tensor(whole, dtype=getattr(whole, "dtype", torch.float32)))
            torch.save(state, tmp_path / "foreign.pt")
            with pytest.raises(CheckpointError) as fault:
                load_checkpoint(tmp_path / "foreign.pt", Spider)
            said = str(fault.value).partition(": ")[2]
            assert said.startswith(f"optimizer_state_dict.{optimizer}.state.") and f"{key}: " in said or (
                said.startswith("it contains ")), (name, said)
        held[key] = whole
    torch.save(state, tmp_path / "foreign.pt")
    load_checkpoint(tmp_path / "foreign.pt", Spider)


@pytest.mark.parametrize("name", ("lm_head.weight", "engram_input.table.multiplier"))
def test_weights_that_are_no_plain_tensors_are_refused_by_name(tmp_path, trained, name):
    for hostile, change in HOSTILE.items():
        weights = dict(trained["model_state_dict"])
        weights[name] = change(weights[name])
        if hostile == "long" and name.endswith("multiplier"):
            continue
        torch.save(trained | dict(model_state_dict=weights), tmp_path / "foreign.pt")
        with pytest.raises(CheckpointError, match=rf"{name}|it contains "):
            load_checkpoint(tmp_path / "foreign.pt", Spider)


def test_tensors_that_share_memory_are_refused(tmp_path, trained):
    weights, states = trained["model_state_dict"], trained["optimizer_state_dict"]["adamw"]["state"]
    for one, key, other in ((states[0], "exp_avg_sq", states[0]["exp_avg"]), (weights, "core.dt", weights["core.B"]),
                            (states[0], "step", states[1]["step"]), (states[0], "exp_avg", weights["null_segment"])):
        whole, one[key] = one[key], other
        torch.save(trained, tmp_path / "foreign.pt")
        one[key] = whole
        with pytest.raises(CheckpointError, match=r"_state_dict\.\S+: shares its storage"):
            load_checkpoint(tmp_path / "foreign.pt", Spider)


def test_what_takes_more_memory_or_time_than_its_file_has_bytes_is_refused(tmp_path, trained):
    class Zeros:
        def __reduce__(self):
            return bytearray, (1 << 40,)
    deep = wide = ()
    for _ in range(60):
        deep = [deep, deep]                                               # 2 ** 60 values in 60 lists
    for _ in range(10):
        wide = [wide] * 100
    path, endless = tmp_path / "foreign.pt", []
    endless.append(endless)
    for extra, said in ((Zeros(), "it contains "), (deep, "nested deeper than 16"), (wide, "more than 262,144 values"),
                        (endless, "nested deeper"), ("x" * 70_000, "extra: a str that"), (10 ** 400, "a int that"),
                        ({(1, 2): 3}, "extra: a dict that"), ({1, 2}, "it contains"), (b"x", "it contains")):
        torch.save(trained | dict(extra=extra), path)
        with pytest.raises(CheckpointError, match=said):
            load_checkpoint(path, Spider)
    torch.save(trained, path)
    with zipfile.ZipFile(path) as archive:
        records = [(record, archive.read(record)) for record in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for record, content in records:
            archive.writestr(record.filename, content)
    with pytest.raises(CheckpointError, match="records are compressed"):
        load_checkpoint(path, Spider)
    with zipfile.ZipFile(path, "w") as archive:
        for record, content in records:
            archive.writestr(record.filename, content)
        largest = max(archive.filelist, key=lambda record: record.file_size)
        for number in range(9):                                           # names of the same bytes
            archive.filelist.append(copy.copy(largest))
            archive.filelist[-1].filename = f"archive/data/{1000 + number}"
    with pytest.raises(CheckpointError, match="compressed or overlap"):
        load_checkpoint(path, Spider)


def test_a_checkpoint_that_another_program_saved_is_read_with_a_warning(tmp_path, shards, capsys):
    directory = run(tmp_path, shards, steps=2)
    torch.save(final_state(directory), tmp_path / "copy.pt")
    run(tmp_path, shards, "--resume", str(tmp_path / "copy.pt"), steps=3, ckpt="other")
    assert "no checksum" in capsys.readouterr().err


def test_a_checkpoint_that_would_execute_something_is_refused_and_nothing_runs(tmp_path, shards, capsys):
    class Harmful:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")
    torch.save({"step": Harmful()}, tmp_path / "foreign.pt")
    assert train.command_line(["--resume", str(tmp_path / "foreign.pt"), "--data_dir", str(shards)]) == 2
    assert not (tmp_path / "harm").exists() and "it contains io.open, which no" in capsys.readouterr().err
