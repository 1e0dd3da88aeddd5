"""data.py: verify, show, and its command line."""

import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import data
from bad_data import prepared, quick_disk  # noqa: F401
from bad_data import TEXTS, complaint, snapshot, text, write_shard
from conftest import ROOT, prepare
from spider.data.loader import Loader
from spider.data.shards import mock_source, open_data
from spider.flags import number
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE


def test_verify_notices_what_changed(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 300)
    out = tmp_path / "o"
    assert prepare(tmp_path / "a.txt", "--out", out, "--unit_mb", "0.02") == 0 and data.main(["verify", str(out)]) == 0
    assert "shards are valid\n" in capsys.readouterr().out
    shard = out / "train-00001.bin"
    sound = shard.read_bytes()
    for change, said in [(bytes([sound[0], sound[1], sound[2] ^ 1]) + sound[3:], "SHA-256"), (sound[:-2], "truncated"),
                         (sound[:4] + b"\xff\xff" + sound[6:], "byte offset 4: id 65535"), (b"", "empty")]:
        shard.write_bytes(change)
        assert data.main(["verify", str(out)]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert len(lines) == 1 and str(shard) in lines[0] and said in lines[0]
    shard.unlink()
    assert data.main(["verify", str(out)]) == 2 and "missing" in capsys.readouterr().err


def test_verify_without_metadata_reports_that_it_only_checked_the_format(tmp_path, capsys):
    write_shard(tmp_path / "a" / "x.bin", range(100))
    assert data.main(["verify", str(tmp_path)]) == 0
    assert "1 shards are valid; 1 of them are not in a metadata.json" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["prepare", "nowhere", "--out", "o"], ["verify", "nowhere"], ["verify"],
                                       ["polish"], []])
def test_the_script_fails_in_one_line_with_status_2(tmp_path, arguments):
    done = subprocess.run([sys.executable, ROOT / "data.py", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("data.py: error: ")


def test_whatever_is_in_a_name_is_printed_escaped(tmp_path, capsys):
    """Of files, folders, columns, and whatever other people's metadata say."""
    evil = "\x1b[2Jred\n\x07\u202e\udcff"
    folder, out = tmp_path / f"in{evil}", tmp_path / f"out{evil}"
    folder.mkdir()
    (folder / f"a{evil}.txt").write_text("some text")
    (folder / f"b{evil}.md{evil}").write_text("passed over")
    (folder / f"loop{evil}").symlink_to(".")
    (folder / f"c{evil}.jsonl").write_text('{"text": 5}')
    (tmp_path / f"d{evil}.parquet").write_bytes(b"PAR1 and no more")
    stranger = tmp_path / f"shards{evil}"
    write_shard(stranger / f"x{evil}.bin", range(100))
    write_shard(stranger / f"long{evil}.bin", [300])
    (stranger / f"loop{evil}").symlink_to(".")
    assert prepare(folder, "--out", out) == 2
    (folder / f"c{evil}.jsonl").unlink()
    assert prepare(folder, "--out", out) == prepare(folder, "--out", out) == data.main(["verify", str(out)]) == 0
    assert data.main(["show", str(out), "--seq_len", "3"]) == 0
    assert prepare(tmp_path / f"d{evil}.parquet", "--out", tmp_path / "o") == 2
    assert prepare(folder, "--field", evil, "--out", out) == 2
    assert data.main(["verify", str(stranger)]) == 2
    (stranger / f"long{evil}.bin").unlink()
    assert data.main(["verify", str(stranger)]) == data.main(["show", str(stranger), "--seq_len", "3"]) == 0
    (stranger / "metadata.json").write_text(json.dumps(dict(shards=[dict(
        name=evil, ids=1, split="train", sha256=evil)])))
    assert data.main(["verify", str(stranger)]) == 2
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).split("\n")), [out, err]
    assert "shards are valid" in out and "already prepared" in out and r"\x1b[2Jred\n" in out


def shown(text: str) -> list[int]:
    """The ids of what `show` prints."""
    ids, names = [], dict(PAD=PAD_ID, BOS=BOS_ID, EOS=EOS_ID)
    for name, byte, escaped, plain in re.findall(r"\\<(\w+)>|\\x(..)|\\(.)|(.)", text):
        ids += [names[name] if name in names else int(name)] if name else [int(byte, 16)] if byte else \
            [ord(dict(n="\n", t="\t", r="\r").get(escaped, escaped))] if escaped else plain.encode()
    return ids


def test_show_prints_what_the_loader_gives(tmp_path, capsys):
    rng = np.random.default_rng(0)
    wild = rng.integers(0, VOCAB_SIZE, 900)                   # control bytes, what is no UTF-8, every id above 255
    tame = np.frombuffer("na\u00efve \\ \u4f60\u597d\n\\<BOS>\x1b[2J\u202e".encode() * 40, np.uint8)
    write_shard(tmp_path / "wild" / "1.bin", wild[:500])
    write_shard(tmp_path / "wild" / "2.bin", wild[500:])
    write_shard(tmp_path / "tame" / "x.bin", tame)
    spec = f"{tmp_path}/wild:2,{tmp_path}/tame:1"
    sources = open_data(spec)
    loader, first, count = Loader(sources, 64, 3), 20, 60
    ids, labels, g = loader.micro_batch(first, 0, count)
    assert data.main(["show", spec, *f"--seq_len 64 --seed 3 --first {first} --count {count}".split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * count and all(line.isprintable() for line in lines)
    epochs = set()
    for i in range(count):
        head, row = lines[2 * i], shown(lines[2 * i + 1][4:])
        assert [-100 if target == PAD_ID else target for target in row[1:]] == labels[i].tolist(), head
        assert row[:-1] == torch.where(ids[i] == PAD_ID, torch.tensor(row[:-1]), ids[i]).tolist(), head
        shape = r"(.*): epoch (.*), (.*), (.*): byte offset (.*)"
        number, epoch, name, path, offset = re.fullmatch(shape, head).groups()
        assert int(number) == g[i] and path.startswith(name) and name in (source.name for source in sources)
        assert np.fromfile(path, "<u2", 1, offset=int(offset))[0] == row[0]
        assert int(epoch) == loader.epochs(int(number))[[source.name for source in sources].index(name)]
        epochs.add(int(epoch))
    assert len(epochs) > 3 and PAD_ID in ids[:, -1]           # there were short windows too


def test_show_of_the_mock_data_is_what_a_mock_run_reads(capsys):
    assert data.main(["show", "--mock_data", "--seed", "7", "--first", "5", "--seq_len", "100", "--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ids, labels, _ = Loader([mock_source(7)], 100, 7).micro_batch(5, 0, 2)
    assert [shown(line[4:]) for line in lines[1::2]] == torch.cat([ids, labels[:, -1:]], 1).tolist()
    assert lines[0].startswith("5: epoch 0, mock, mock data: byte offset ")
    for arguments in ([], ["data", "--mock_data"]):
        assert data.main(["show", *arguments]) == 2
        assert "either the run's --data_dir or its --mock_data" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["show --mock_data --count 100000", "--help", "verify o",
                                       "prepare in.txt --out p --workers 1"])
def test_a_pipe_that_nobody_reads_is_not_an_error(tmp_path, arguments, unbuffered):
    (tmp_path / "in.txt").write_text("some text")
    assert prepare(tmp_path / "in.txt", "--out", tmp_path / "o") == 0
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, ROOT / "data.py", *arguments.replace("in.txt", str(tmp_path / "in.txt")).split()]
    run = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True,
                         env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    os.close(writing)
    assert run.returncode == 0 and all(line.startswith(("prepare: ", "verify: ")) for line in run.stderr.splitlines())
    assert "--out p" not in arguments or (tmp_path / "p" / "metadata.json").exists()


def test_show_into_a_pipe_that_closes_prints_no_error():
    command = [sys.executable, ROOT / "data.py", "show", "--mock_data", "--seq_len", "64", "--count", "100000"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout.readline().startswith(b"0: epoch 0, mock")
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait() == 0


def test_random_command_lines_of_data_py_are_refused_in_a_line(prepared, capsys, monkeypatch):
    monkeypatch.chdir(prepared)
    flags = {"prepare": ["--out", "--field", "--val_fraction", "--workers", "--unit_mb", "--ext", "--format"],
             "verify": ["--x"],
             "show": ["--seq_len", "--seed", "--first", "--count", "--mock_data"]}
    rng, before, refused = random.Random(9), snapshot(prepared), 0
    for _ in range(1000):
        command = rng.choice([*flags, "polish"])
        argv = [command, *(rng.choice((rng.choice(flags.get(command, [""])), rng.choice(TEXTS), text(rng, 6), "web",
                                       rng.choice(flags.get(command, [""])) + "=" + rng.choice(TEXTS)))
                           for _ in range(rng.randrange(4)))]
        if command == "show" and {"web", "--mock_data"} & {*argv} or argv[:2] == ["verify", "web"]:
            continue                                          # some of these are fine
        complaint(capsys, *argv)
        refused += 1
    assert snapshot(prepared) == before and refused > 700


@pytest.mark.parametrize("flag, low", [("--seq_len", 1), ("--seed", 0), ("--first", 0), ("--count", 1),
                                       ("--workers", 1), ("--val_fraction", None), ("--unit_mb", None)])
def test_any_bad_value_of_a_flag_of_data_py_is_named(prepared, capsys, flag, low):
    rng, before, refused = random.Random(10), snapshot(prepared), 0
    argv = ["show", "--mock_data"] if flag in ("--seq_len", "--seed", "--first", "--count") else [
        "prepare", prepared.parent / "a.jsonl", "--out", prepared / "o"]
    for value in TEXTS + [text(rng, 9) for _ in range(60)]:
        try:
            good = low <= number(value) < 1 << 62 and number(value).is_integer() if low is not None else \
                0 <= number(value) < 1 if flag == "--val_fraction" else 0 < number(value) <= 1e6
        except ValueError:
            good = False
        if not good:
            refused += 1
            assert flag in complaint(capsys, *argv, f"{flag}={value}")
    assert snapshot(prepared) == before and refused > 70
