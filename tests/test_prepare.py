"""Text, JSON lines and parquet, packed or not, become shards; kills, full disks and bad input on the way."""

import fcntl
import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import data
from conftest import ROOT, SHARED, contents, measured, prepare
from spider import errors
from spider.console import ProgressBar
from spider.data.prepare import PACKED, Input, Options, import_zstd, open_input, plan, read_journal
from spider.data.shards import open_data, open_source
from spider.files import durable
from tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE

SHAKESPEARE = SHARED / "tinyshakespeare.txt"


def joined(directory: Path, split: str) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.glob(f"{split}-*.bin")))


def documents(directory: Path, split: str) -> list[bytes]:
    """The documents of a split; fails where one does not begin with BOS and end with EOS."""
    out = []
    for ids in np.split(ids := np.frombuffer(joined(directory, split), "<u2"), np.flatnonzero(ids == EOS_ID) + 1)[:-1]:
        assert ids[0] == BOS_ID and ids[-1] == EOS_ID and (ids[1:-1] < 256).all()
        out.append(ids[1:-1].astype(np.uint8).tobytes())
    return out


@pytest.fixture
def mixed(tmp_path) -> Path:
    """A directory with a text, JSON-lines with unicode, blank lines and long lines, and a file of another kind."""
    rng, inputs = np.random.default_rng(0), tmp_path / "in"
    (inputs / "sub").mkdir(parents=True)
    (inputs / "a.txt").write_bytes(rng.integers(0, 256, 5000).astype(np.uint8).tobytes())
    texts = ["plain", "", "na\u00efve \u4f60\u597d \U0001f577", 'quote " and \\ and\nnewline']
    texts += ["x" * n for n in range(0, 3000, 40)]
    lines = [json.dumps(dict(id=i, text=text), ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    (inputs / "sub" / "b.jsonl").write_text("\n\n" + "\n  \n".join(lines), encoding="utf-8")
    (inputs / "sub" / "ignored.md").write_text("not data")
    return inputs


def test_a_worker_starts_without_torch():
    """data.py and prepare.py are what it imports."""
    code = "import sys, prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.skipif(
    not SHAKESPEARE.exists(), reason="../shared/data/tinyshakespeare.txt is not there"))])
def test_tinyshakespeare_is_split_as_everyone_splits_it(tmp_path, real):
    """Or any text of its length: by bytes, wherever characters and lines end."""
    text = SHAKESPEARE.read_bytes() if real else random.Random(0).randbytes(1_115_394)
    (tmp_path / "in.txt").write_bytes(text)
    assert prepare(tmp_path / "in.txt", "--out", tmp_path / "o") == 0
    train, val = (documents(tmp_path / "o", split) for split in ("train", "val"))
    assert train == [text[:1_003_854]] and val == [text[1_003_854:]] and len(val[0]) == 111_540
    [found] = open_data(str(tmp_path / "o"))
    assert len(found.train) == 1_003_856 and len(found.val) == 111_542


def test_json_lines_become_documents_of_which_a_hash_chooses_some_to_validate(tmp_path):
    texts = [f"document {i} \u00fc\u4e2d\U0001f600 " + "y" * (i % 50) for i in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(f"\n{json.dumps(dict(body=text))}\r\n" for text in texts))
    assert prepare(tmp_path / "a.jsonl", "--out", tmp_path / "o", "--field", "body", "--val_fraction", "0.25") == 0
    train, val = ([document.decode() for document in documents(tmp_path / "o", split)] for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts) and 60 < len(val) < 140
    assert train == [text for text in texts if text in set(train)]                    # in their order
    metadata = json.loads((tmp_path / "o" / "metadata.json").read_text())
    assert metadata["totals"]["val"]["documents"] == len(val) and metadata["vocab_size"] == VOCAB_SIZE


@pytest.mark.parametrize("unit_mb, workers", [(0.001, 1), (0.0003, 2)])
def test_the_size_of_units_and_the_workers_do_not_change_the_stream(mixed, tmp_path, monkeypatch, unit_mb, workers):
    assert prepare(mixed, "--out", tmp_path / "one") == 0
    monkeypatch.setattr("prepare.MIB", 50)                      # in workers it stays what it is
    assert prepare(mixed, "--out", tmp_path / "many", "--unit_mb", unit_mb, "--workers", workers) == 0
    assert len(list((tmp_path / "one").glob("*.bin"))) == 2 and len(list((tmp_path / "many").glob("*.bin"))) > 15
    for split in ("train", "val"):
        assert joined(tmp_path / "one", split) == joined(tmp_path / "many", split) != b""
    one, many = (json.loads((tmp_path / out / "metadata.json").read_text()) for out in ("one", "many"))
    assert one["totals"] == many["totals"]
    names = [entry["name"] for entry in many["shards"] if entry["split"] == "train"]
    assert names == sorted(names)


@pytest.mark.parametrize("unit_bytes", [1, 16, 17, 18, 34, 100, 1000])
def test_a_line_belongs_to_the_unit_that_it_begins_in(tmp_path, unit_bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b'{"text": "%04d"}\n' % i for i in range(20)))          # 17 bytes each
    source, options = Input(str(path), path.stat().st_size, 0, "jsonl"), Options("text", 0.0, unit_bytes)
    units = plan([source], options)
    texts = [text for _, pieces in units for _, reader, path, *rest in pieces
             for _, text, _, _ in reader(open(path, "rb"), *rest)]
    assert texts == [b"%04d" % i for i in range(20)] and len(units) == -(-340 // unit_bytes)


def test_the_same_command_again_does_nothing_and_other_inputs_are_refused(mixed, tmp_path, capsys):
    assert prepare(mixed, "--out", tmp_path / "o") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}
    (tmp_path / "o" / "prepare.jsonl").write_text("a kill may leave it")
    assert prepare(mixed, "--out", tmp_path / "o") == 0
    assert "already prepared" in capsys.readouterr().out
    assert prepare(mixed, "--out", tmp_path / "o", "--val_fraction", "0.2") == 2
    (mixed / "a.txt").write_text("changed")
    assert prepare(mixed, "--out", tmp_path / "o") == 2
    assert capsys.readouterr().err.count("choose another --out, or delete it") == 2
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}


# ---------------------------------------------------------------------------------------------------------------------
# Killed, and again

KILLED = """
import os, signal, sys, data
name, count = sys.argv[1], int(sys.argv[2])
real = getattr(os, name)
def kill_at(*args):
    global count
    count -= 1
    if count < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
setattr(os, name, kill_at)
sys.exit(data.main(sys.argv[3:]))
"""


@pytest.mark.parametrize("call, count", [("fsync", 0), ("fsync", 2), ("fsync", 9), ("replace", 8), ("replace", 11)])
def test_a_killed_prepare_goes_on_and_ends_byte_for_byte_the_same(mixed, tmp_path, capfd, call, count):
    arguments = [str(mixed), "--unit_mb", "0.02", "--out"]    # about 7 units, killed before a call of fsync or replace
    assert prepare(*arguments, tmp_path / "undisturbed") == 0
    command = [sys.executable, "-c", KILLED, call, str(count), "prepare", "--workers", "1", *arguments, tmp_path / "o"]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert not (tmp_path / "o" / "metadata.json").exists()
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").glob("*.bin")}
    capfd.readouterr()
    assert prepare(*arguments, tmp_path / "o") == 0
    assert contents(tmp_path / "o") == contents(tmp_path / "undisturbed")
    kept = sum(path.stat().st_mtime_ns == changed for path, changed in shards.items())
    assert kept >= len(shards) - 2 and ("goes on" in capfd.readouterr().out) == (kept > 0)


def test_a_journal_line_cut_short_and_a_lost_shard_are_done_again(mixed, tmp_path, monkeypatch):
    arguments, journal = [mixed, "--unit_mb", "0.02", "--out"], tmp_path / "o" / "prepare.jsonl"
    assert prepare(*arguments, tmp_path / "undisturbed") == 0
    monkeypatch.setattr("prepare.durable", lambda path, real=durable:
                        real(path) if path.name == "prepare.jsonl" else sys.exit("killed before the end"))
    for _ in range(2):
        with pytest.raises(SystemExit):
            prepare(*arguments, tmp_path / "o")
        units = read_journal(journal)[1]
        assert sorted(units) == list(range(len(units))) and len(units) > 4
        journal.write_bytes(journal.read_bytes()[:-30])
        (tmp_path / "o" / "train-00001.bin").write_bytes(b"xx")
        (tmp_path / "o" / ".train-00002.bin.1.tmp").write_bytes(b"left over")
        assert sorted(read_journal(journal)[1]) == [0, *range(2, len(units) - 1)]
    monkeypatch.undo()
    assert prepare(*arguments, tmp_path / "o") == 0
    assert contents(tmp_path / "o") == contents(tmp_path / "undisturbed")


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for orphans in /proc")
def test_workers_die_with_a_killed_prepare(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(3_000_000))
    arguments = [tmp_path / "a.txt", "--unit_mb", "0.02", "--out"]
    command = [sys.executable, "data.py", "prepare", "--workers", "2", *arguments, tmp_path / "o"]
    run, deadline = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL), time.monotonic() + 240
    while not list(tmp_path.glob("o/*.bin")) and time.monotonic() < deadline:
        time.sleep(0.001)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.kill()
    assert run.wait() == -signal.SIGKILL and len(children) >= 2
    deadline = time.monotonic() + 60
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, children))
    assert prepare(*arguments, tmp_path / "o") == 0 and prepare(*arguments, tmp_path / "undisturbed") == 0
    assert contents(tmp_path / "o") == contents(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("workers, stdin", [(1, False), (3, False), (1, True), (2, True)])
def test_prepare_survives_kills_at_random_moments(tmp_path, workers, stdin):
    """Of the run alone, whose workers then die by themselves, or of all its processes at once."""
    rng = random.Random(workers)
    lines = [json.dumps(dict(text=" \u00e4\U0001f577" * rng.randrange(500))) for _ in range(1000)]
    (tmp_path / "a.txt").write_bytes(rng.randbytes(1_500_000))
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[::3]).encode()))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(rng.randbytes(200_000)))
    inputs = ["-"] if stdin else [tmp_path / name for name in ("a.txt", "b.jsonl", "c.jsonl.gz", "d.txt.gz")]

    def start(out):
        command = [sys.executable, "data.py", "prepare", *inputs, "--workers", str(workers), "--unit_mb", "0.02"]
        with open(tmp_path / "a.txt") as file:
            return subprocess.Popen([*command, "--out", tmp_path / out], cwd=ROOT, stdin=file, start_new_session=True,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    begun = time.monotonic()
    assert start("undisturbed").wait() == 0
    took, kills, run = time.monotonic() - begun, 0, start("o")
    while kills < 12:
        try:
            assert run.wait(rng.uniform(0.1, 0.6) * took) == 0
        except subprocess.TimeoutExpired:
            kills += 1
            os.killpg(run.pid, signal.SIGKILL) if rng.randrange(2) else run.kill()
            assert run.wait() == -signal.SIGKILL
            run = start("o")
            continue
        if kills > 1:
            break
        took /= 2                         # something held up the undisturbed run: once more, with less time
        shutil.rmtree(tmp_path / "o")
        run = start("o")
    assert run.wait() == 0 and kills > 1
    assert contents(tmp_path / "o") == contents(tmp_path / "undisturbed")


# ---------------------------------------------------------------------------------------------------------------------
# What is taken, and what is not

def test_standard_input_is_prepared_like_a_file(tmp_path, monkeypatch, capsys):
    text = bytes(range(256)) * 10
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert prepare("-", "--out", tmp_path / "o", "--val_fraction", "0.5") == 0
        assert documents(tmp_path / "o", "train") == documents(tmp_path / "o", "val") == [text[:1280]]
    assert "already prepared" in capsys.readouterr().out
    assert sorted(contents(tmp_path / "o")) == ["metadata.json", "train-00000.bin", "val-00000.bin"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"other")))
    assert prepare("-", "--out", tmp_path / "o") == 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert prepare("-", "--out", tmp_path / "p") == 2 and "-: empty" in capsys.readouterr().err


def test_two_that_prepare_into_one_directory_do_not_meet(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("other text")
    command = [sys.executable, "data.py", "prepare", "-", "--workers", "1", "--out", tmp_path / "o"]
    first, deadline = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE), time.monotonic() + 60
    while not (tmp_path / "o" / ".stdin.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for given in (tmp_path / "a.txt", "-"):                   # the second is refused before it reads anything
        assert prepare(given, "--out", tmp_path / "o") == 2
        assert capsys.readouterr().err == (f"data.py: error: {tmp_path}/o: another prepare works in it: wait for it, "
                                           "or choose another --out\n")
    assert os.listdir(tmp_path / "o") == [".stdin.txt"]
    first.communicate(b"a text")
    assert first.returncode == 0 and documents(tmp_path / "o", "train") == [b"a tex"]
    assert prepare(tmp_path / "a.txt", "--out", tmp_path / "o") == 2    # the lock is free again
    assert "holds shards from other inputs" in capsys.readouterr().err


def test_a_directory_that_another_prepare_has_just_deleted_is_not_worked_in(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / "o").rmdir())
    assert prepare(tmp_path / "a.txt", "--out", tmp_path / "o") == 2
    assert "another prepare works in it" in capsys.readouterr().err and os.listdir(tmp_path) == ["a.txt"]


def test_a_file_system_without_locks_is_said_and_worked_in(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert prepare(tmp_path / "a.txt", "--out", tmp_path / "o") == 0
    assert f"{tmp_path}/o cannot be locked (Operation not supported): see" in capsys.readouterr().err


def test_what_fails_leaves_no_directory_behind(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    assert prepare(tmp_path / "a.txt", "--out", tmp_path / "new" / "below" / "o") == 2
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_mixed_folder_says_what_is_passed_over_and_how_many(mixed, tmp_path, capsys):
    for name in ("b.md", "c.md", "d.py", "Makefile", ".git/HEAD", "sub/.hidden.txt", "odd.\x07"):
        (mixed / name).parent.mkdir(exist_ok=True)
        (mixed / name).write_text("x")
    for i in range(9):
        (mixed / f"x.kind{i}").write_text("x")
    (mixed / "sub" / "again.txt").symlink_to(mixed / "a.txt")
    assert prepare(mixed, "--out", tmp_path / "o") == 0
    again, line, _ = capsys.readouterr().err.splitlines()
    assert again == (f"prepare: {mixed}: skipped {mixed}/sub/again.txt: link loops, or other names of what is read "
                     "anyway")
    assert line.startswith(f"prepare: {mixed}: skipped 3 .md ({mixed}/b.md, ...), 2 hidden ({mixed}/.git, ...), 1 ")
    assert line.count(" 1 ") == 6 and ", ...; --ext takes other kinds" in line and r".\x07" in line
    assert prepare(mixed / "a.txt", "--out", tmp_path / "p") == 0 and "passed" not in capsys.readouterr().err


def code_folder(folder: Path, count: int = 100) -> dict[str, bytes]:
    """Source code in nested folders: path below it -> content."""
    rng = random.Random(1)
    files = {f"{'sub/' * (i % 3)}{rng.choice('abcdef')}{i}.{('py', 'md', 'RST')[i % 3]}":
             f"# \u00fc{i}\n".encode() + rng.randbytes(rng.randrange(300)) for i in range(count)}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return files


def test_with_ext_every_file_is_a_document_of_which_a_hash_chooses_some_to_validate(tmp_path, capsys):
    files = code_folder(tmp_path / "in")
    for name in ("sub/__init__.py", "notes.txt", "x.jsonl"):
        (tmp_path / "in" / name).write_text("" if name.endswith("py") else "no JSON")
    argv = [tmp_path / "in", "--ext", ".py,.md,.rst", "--out"]
    assert prepare(*argv, tmp_path / "one") == prepare(*argv, tmp_path / "many", "--unit_mb", "0.0001") == 0
    line = capsys.readouterr().err.splitlines()[0]
    assert all(said in line for said in ("1 .jsonl (", "1 .txt (", f"1 empty ({tmp_path}/in/sub/__init__.py)")), line
    train, val = (documents(tmp_path / "one", split) for split in ("train", "val"))
    assert len(train) + len(val) == 100 and 3 < len(val) < 25
    in_order = [files[str(path)] for path in sorted(map(Path, files))]
    assert train == [file for file in in_order if file in set(train)] and set(train) | set(val) == set(in_order)
    for split in ("train", "val"):
        assert joined(tmp_path / "one", split) == joined(tmp_path / "many", split)
    assert len(list(tmp_path.glob("many/*.bin"))) > 100       # files longer than a unit are cut, and stay one document
    assert prepare(*argv, tmp_path / "one") == 0 and "already prepared" in capsys.readouterr().out
    assert prepare(tmp_path / "in", "--ext", ".py", "--out", tmp_path / "one") == 2


def test_a_text_file_is_one_whole_document_with_ext_and_cut_for_validation_without(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    for options, train, val in (([], [b"01234"], [b"56789"]), (["--ext", ".txt"], [], [b"0123456789"])):
        out = tmp_path / f"o{len(options)}"
        assert prepare(tmp_path / "a.txt", "--val_fraction", "0.5", *options, "--out", out) == 0
        assert documents(out, "train") == train and documents(out, "val") == val


def test_ext_text_takes_whatever_is_utf_8_and_counts_the_rest(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("prepare.MIB", 7)                       # characters lie across what is read at a time
    texts = {"Makefile": "\u4f60\u597d\U0001f577 na\u00efve \U0001f577", "a.py": "print()", "d/b.jsonl": '{"text": ""}'}
    rest = {"latin.txt": "na\u00efve, more".encode("latin-1"), "cut.txt": "0123456789\u00e4".encode()[:-1],
            "zeros": bytes(9), "empty.py": b"", "image.png": b"\x89PNG\r\n", "late.txt": b"x" * 100 + b"\xff"}
    (tmp_path / "in" / "d").mkdir(parents=True)
    for name, content in (rest | {name: text.encode() for name, text in texts.items()}).items():
        (tmp_path / "in" / name).write_bytes(content)
    os.mkfifo(tmp_path / "in" / "pipe")
    (tmp_path / "in" / "dangling.py").symlink_to("gone")
    assert prepare(tmp_path / "in", "--ext", "text", "--val_fraction", "0", "--out", tmp_path / "o") == 0
    line = capsys.readouterr().err.splitlines()[0]
    for said in ("4 not UTF-8 (", "2 not a file (", "1 empty (", "1 not text ("):
        assert said in line
    assert documents(tmp_path / "o", "train") == [texts[name].encode() for name in ("Makefile", "a.py", "d/b.jsonl")]
    for name in rest:
        assert prepare(tmp_path / "in" / name, "--ext", "text", "--out", tmp_path / "p") == 2
        assert capsys.readouterr().err.startswith(f"data.py: error: {tmp_path}/in/{name}: ")


def test_standard_input_of_another_format_is_that_or_refused_with_the_remedy(tmp_path, monkeypatch, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the extra: pip install -e '.[parquet]'")
    import pyarrow.parquet as parquet
    lines = "".join(json.dumps(dict(text=f"document {i}")) + "\n" for i in range(50))
    parquet.write_table(pyarrow.table(dict(text=[f"row {i}" for i in range(50)])), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(lines)
    for kind in ("jsonl", "parquet"):
        raw = (tmp_path / f"a.{kind}").read_bytes()
        assert prepare(tmp_path / f"a.{kind}", "--out", tmp_path / f"from_{kind}") == 0
        for options, status in (([], 2), (["--format", kind], 0), (["--format", "txt"], 0)):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
            capsys.readouterr()
            assert prepare("-", *options, "--out", tmp_path / "".join([kind, *options])) == status
            assert ("--format says what it is" in capsys.readouterr().err) == (status == 2)
        for split in ("train", "val"):
            assert joined(tmp_path / f"{kind}--format{kind}", split) == joined(tmp_path / f"from_{kind}", split)
        assert len(documents(tmp_path / f"{kind}--formattxt", "train")) == 1
    for raw, said in ((b"\x1f\x8b\x08 and so on", "-: looks like gzip"), (b'{"text": 5}', "-: looks like JSON-lines")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        assert prepare("-", "--out", tmp_path / "p") == 2 and said in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "fine"}\n{"text": 5}')))
    assert prepare("-", "--format", "jsonl", "--out", tmp_path / "p") == 2
    assert "error: -:2: no object with a string 'text'" in capsys.readouterr().err


def test_what_was_prepared_before_there_were_ext_and_format_is_recognised(mixed, tmp_path, capsys):
    """The fingerprint of plain inputs is what it was."""
    assert prepare(mixed, "--out", tmp_path / "o") == 0
    known = [[str(path), path.stat().st_size, path.stat().st_mtime_ns]
             for path in (mixed / "a.txt", mixed / "sub" / "b.jsonl")]
    fingerprint = hashlib.sha256(json.dumps([known, ["text", 0.1, 64_000_000]]).encode()).hexdigest()
    assert json.loads((tmp_path / "o" / "metadata.json").read_text())["fingerprint"] == fingerprint


def test_parquet_rows_become_documents(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the extra: pip install -e '.[parquet]'")
    import pyarrow.parquet as parquet
    texts = [f"row {i} \u00e4\u4e2d" for i in range(1000)]
    parquet.write_table(pyarrow.table(dict(id=range(1000), text=texts)), tmp_path / "a.parquet", row_group_size=70)
    assert prepare(tmp_path / "a.parquet", "--out", tmp_path / "one") == 0
    assert prepare(tmp_path / "a.parquet", "--out", tmp_path / "many", "--unit_mb", "0.001") == 0
    train, val = ([document.decode() for document in documents(tmp_path / "one", split)] for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts) and 50 < len(val) < 150
    assert train == [text for text in texts if text in set(train)]
    parquet.write_table(pyarrow.table(dict(text=texts)), tmp_path / "b.parquet")        # the same in one row group
    assert prepare(tmp_path / "b.parquet", "--out", tmp_path / "whole") == 0
    for split in ("train", "val"):
        assert joined(tmp_path / "one", split) == joined(tmp_path / "many", split) == joined(tmp_path / "whole", split)
    assert len(list((tmp_path / "many").glob("train-*.bin"))) > 5
    parquet.write_table(pyarrow.table(dict(text=["a", None])), tmp_path / "null.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    capsys.readouterr()
    for name, field, said in [("a", "body", "no string column 'body'; --field names another of: id (int64), text"),
                              ("a", "id", "no string column 'id'"), ("null", "text", "row 1 (from 0) has no 'text'"),
                              ("broken", "text", "magic bytes not found")]:
        assert prepare(tmp_path / f"{name}.parquet", "--field", field, "--out", tmp_path / "bad") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{name}.parquet: " in error and said in error
        assert not list(tmp_path.glob("bad/*.bin"))


@pytest.mark.parametrize("encoding, size", [("RLE_DICTIONARY", 4 << 20), ("DELTA_BYTE_ARRAY", 1 << 20)])
def test_parquet_is_read_in_memory_for_a_row_not_for_as_many_as_there_are(tmp_path, encoding, size):
    """A row 256 times over, which both encodings store once."""
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the extra: pip install -e '.[parquet]'")
    import pyarrow.parquet as parquet
    row, path = pyarrow.array(["a" * size]), tmp_path / "a.parquet"
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 256, pyarrow.int32()), row)
    if encoding == "RLE_DICTIONARY":
        how = dict(store_schema=False)
    else:
        rows, how = rows.cast("string"), dict(use_dictionary=False, column_encoding=dict(text=encoding))
    parquet.write_table(pyarrow.table(dict(text=rows)), path, compression="zstd", **how)
    assert path.stat().st_size < 5000
    code = ("import sys, prepare; options = prepare.Options('text', 0.0, 1);"
            "[(_, (reader, path, *rest))] = prepare.cut_parquet(prepare.measure(sys.argv[1], 'parquet'), 0, options);"
            "read = [len(text) for _, text, _, _ in reader(open(path, 'rb'), *rest)]; print(len(read), *set(read))")
    done, peak = measured(code, path)
    assert done.stdout.startswith(f"256 {size}\n") and peak < 260_000, done          # kB: Python, LINE_LIMIT some times


def test_a_parquet_row_of_more_bytes_than_a_json_line_may_have_is_refused(tmp_path, monkeypatch, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the extra: pip install -e '.[parquet]'")
    import pyarrow.parquet as parquet
    monkeypatch.setattr("prepare.LINE_LIMIT", 5000)
    for lengths, said in (([5000, 10, 5001], "row 2 (from 0) has more than 5,000 bytes"), ([5000, 10, 5000], None),
                          ([9000, 9000], "row group 0 has rows of more than 5,000 bytes")):
        texts = [random.Random(i).randbytes(length).hex()[:length] for i, length in enumerate(lengths)]
        parquet.write_table(pyarrow.table(dict(text=texts)), tmp_path / "a.parquet")
        status = prepare(tmp_path / "a.parquet", "--val_fraction", "0", "--out", tmp_path / "o")
        error = capsys.readouterr().err
        assert status == 2 * (said is not None) and (not said or f"a.parquet: {said}" in error and ".txt" in error)
        if status == 0:
            assert [len(text) for text in documents(tmp_path / "o", "train")] == lengths
            shutil.rmtree(tmp_path / "o")


def values(size: int) -> bytes:
    """A JSON line of about so many bytes, of which Python makes an object each three."""
    return b'{"text": "a", "more": [' + b"{}," * (size // 3) + b"0]}\n"


def limited(memory: int, *argv) -> subprocess.CompletedProcess:
    """`data.py prepare` in processes of at most so many bytes."""
    return subprocess.run([sys.executable, "data.py", "prepare", *argv], cwd=ROOT, text=True, capture_output=True,
                          env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory)))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_want_of_memory_is_one_line_that_names_the_file_and_leaves_no_shard(tmp_path, workers):
    (tmp_path / "a.jsonl").write_bytes(LINE)
    (tmp_path / "b.jsonl").write_bytes(values(24 << 20))      # 600 MB
    done = limited(600_000_000, tmp_path, "--workers", workers, "--unit_mb", "1", "--out", tmp_path / "o")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("prepare: ")]
    assert done.returncode == 2 and len(lines) == 1 and f"error: {tmp_path}/b.jsonl: out of memory" in lines[0], done
    assert not list(tmp_path.glob("o/*.tmp"))


def test_a_packed_line_that_is_far_longer_than_its_file_is_refused_before_it_fills_memory(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(values(60 << 20)))
    assert path.stat().st_size < 65_000
    done = limited(500_000_000, path, "--workers", "1", "--out", tmp_path / "o")
    assert done.returncode == 2 and done.stderr.startswith(f"data.py: error: {path}:1: a line of more than 33,554,432 "
                                                           "bytes: ") and ".txt" in done.stderr, done
    assert done.stderr.count("\n") == 1 and os.listdir(tmp_path) == [path.name]


LINE = b'{"text": "fine"}\n'
BAD = {
    "broken line": ({"x.jsonl": 2 * LINE + b'\n{"text": "fi\n'}, ["x.jsonl"], ["x.jsonl:4: not JSON", "offset 35"]),
    "no object": ({"x.jsonl": LINE + b'["text"]\n'}, ["x.jsonl"], ["x.jsonl:2: no object", "'text'"]),
    "no field": ({"x.jsonl": LINE}, ["x.jsonl", "--field", "body"], ["x.jsonl:1:", "'body'", "--field"]),
    "no string": ({"x.jsonl": LINE + b'{"text": 5}'}, ["x.jsonl"], ["x.jsonl:2: no object with a string 'text'"]),
    "not UTF-8": ({"x.jsonl": LINE + b'{"text": "\xff"}\n'}, ["x.jsonl"], ["x.jsonl:2: not UTF-8 at byte 10"]),
    "surrogate": ({"x.jsonl": b'{"text": "ab\\ud800"}'}, ["x.jsonl"], ["x.jsonl:1: a lone surrogate at character 2"]),
    "deep": ({"x.jsonl": b"[" * 200_000}, ["x.jsonl"], ["x.jsonl:1: "]),
    "long line": ({"x.jsonl": LINE + b'{"text": "' + b"x" * 500}, ["x.jsonl"], ["x.jsonl:2: a line of more than 500"]),
    "long blank": ({"x.jsonl": LINE + b" " * 501}, ["x.jsonl"], ["x.jsonl:2: a line of more than 500"]),
    "only blank": ({"x.jsonl": b"\n \n"}, ["x.jsonl"], ["x.jsonl: no document"]),
    "empty": ({"x.txt": b""}, ["x.txt"], ["x.txt: empty"]),
    "missing": ({}, ["x.txt"], ["x.txt: No such file"]),
    "other kind": ({"x.csv": b"a"}, ["x.csv"], ["x.csv: takes .txt, .jsonl, .ndjson, .parquet"]),
    "nothing in it": ({"d/x.csv": b"a"}, ["d"], ["d: takes .txt"]),
    "fraction": ({"x.txt": b"a"}, ["x.txt", "--val_fraction", "1"], ["--val_fraction", "less than 1"]),
    "negative": ({"x.txt": b"a"}, ["x.txt", "--val_fraction", "-0.1"], ["--val_fraction"]),
    "no fraction": ({"x.txt": b"a"}, ["x.txt", "--val_fraction", "nan"], ["--val_fraction"]),
    "no number": ({"x.txt": b"a"}, ["x.txt", "--val_fraction", "x"], ["--val_fraction", "'x'"]),
    "no workers": ({"x.txt": b"a"}, ["x.txt", "--workers", "0"], ["--workers"]),
    "workers": ({"x.txt": b"a"}, ["x.txt", "--workers", "100000"], ["--workers", "from 1 to 1024"]),
    "no size": ({"x.txt": b"a"}, ["x.txt", "--unit_mb", "0"], ["--unit_mb"]),
    "no input": ({}, [], ["INPUT"]),
    "no ending": ({"x.py": b"a"}, ["x.py", "--ext", "py"], ["--ext", "'py'", ".py,.md", "text"]),
    "empty ending": ({"x.py": b"a"}, ["x.py", "--ext", ".py,"], ["--ext", "'.py,'"]),
    "lines by ext": ({"x.jsonl": LINE}, ["x.jsonl", "--ext", ".md,.jsonl"], ["--ext", ".jsonl would be taken as it"]),
    "other ending": ({"x.txt": b"a"}, ["x.txt", "--ext", ".py,.md"], ["x.txt: --ext .py,.md takes nothing of it"]),
    "none of them": ({"d/x.txt": b"a", "d/y.py": b""}, ["d", "--ext", ".py"], ["d: --ext .py takes nothing of it"]),
    "no stdin": ({"x.txt": b"a"}, ["x.txt", "--format", "jsonl"], ["--format", "- is not among the inputs"]),
    "no format": ({"x.txt": b"a"}, ["-", "--format", "csv"], ["--format", "'csv'", "jsonl"]),
    "unknown flag": ({"x.txt": b"a"}, ["x.txt", "--fast"], ["--fast"]),
}


@pytest.mark.parametrize("files, arguments, said", BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2_and_leaves_no_shard(tmp_path, monkeypatch, capsys, files, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prepare.LINE_LIMIT", 300_000 if "deep" in os.environ["PYTEST_CURRENT_TEST"] else 500)
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    assert data.main(["prepare", "--workers", "1", "--out", "o", *arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("prepare: ")]   # progress is no error
    assert len(lines) == 1 and all(part in lines[0] for part in said), err
    assert not Path("o").exists() or os.listdir("o") == ["prepare.jsonl"]


def test_a_full_disk_is_one_line_that_names_the_shard_and_the_command_goes_on(mixed, tmp_path, monkeypatch, capsys):
    def replace(source, target, real=os.replace):
        if target.name == "train-00002.bin":
            raise OSError(28, "No space left on device")
        real(source, target)
    arguments = [mixed, "--unit_mb", "0.02", "--out", tmp_path / "o"]
    monkeypatch.setattr(os, "replace", replace)
    assert prepare(*arguments) == 2
    passed_over, line = capsys.readouterr().err.splitlines()
    assert line == f"data.py: error: {tmp_path}/o/train-00002.bin: No space left on device" and "1 .md" in passed_over
    shards = [f"{split}-{unit}.bin" for split in ("train", "val") for unit in ("00000", "00001")]
    assert sorted(contents(tmp_path / "o")) == ["prepare.jsonl", *shards]
    monkeypatch.undo()
    assert prepare(*arguments) == 0 and "goes on; 2 of" in capsys.readouterr().out


def test_text_that_spells_sentinels_holds_bytes_alone(tmp_path):
    """Control bytes 0-3, and the characters and names whose numbers or words are those of PAD, BOS and EOS."""
    spelled = "".join(map(chr, (0, 1, 2, 3, *range(256, VOCAB_SIZE)))) + "<PAD><BOS><EOS>\\u0101" + "\x03\x00"
    (tmp_path / "a.txt").write_bytes(spelled.encode() + b"\xff\xfe")
    (tmp_path / "b.jsonl").write_text(json.dumps(dict(text=spelled)))
    for name, raw in (("a.txt", spelled.encode() + b"\xff\xfe"), ("b.jsonl", spelled.encode())):
        assert prepare(tmp_path / name, "--val_fraction", "0", "--out", tmp_path / name[0]) == 0
        assert documents(tmp_path / name[0], "train") == [raw] and raw[:4] == bytes(range(4))


# ---------------------------------------------------------------------------------------------------------------------
# Packed inputs

def pack(raw: bytes, ending: str, parts: int = 1) -> bytes:
    """Packed with a checksum, in so many members or frames, one behind the other."""
    if ending == ".zst":
        zstd = import_zstd("")
        checked = {zstd.CompressionParameter.checksum_flag: 1}
    cuts = [len(raw) * i // parts for i in range(parts + 1)]
    return b"".join(gzip.compress(raw[a:b], mtime=0) if ending == ".gz" else zstd.compress(raw[a:b], options=checked)
                    for a, b in zip(cuts, cuts[1:]))


@pytest.fixture(params=PACKED)
def packing(request) -> str:
    if request.param == ".zst":
        try:
            import_zstd("")
        except errors.DataError as fault:
            pytest.skip(str(fault))
    return request.param


@pytest.mark.parametrize("options", [[], ["--val_fraction", "0"], ["--val_fraction", "0.999"], ["--ext", ".txt,.md"]])
def test_packed_files_become_what_they_are_unpacked_in_shards_of_bounded_size(
        mixed, tmp_path, monkeypatch, packing, options):
    (mixed / "sub" / "b.jsonl").replace(mixed / "z.jsonl")    # packed names sort as the others do
    twin = tmp_path / "packed"
    (twin / "sub").mkdir(parents=True)
    for parts, name in enumerate(("a.txt", "z.jsonl", "sub/ignored.md"), 1):
        (twin / (name + packing)).write_bytes(pack((mixed / name).read_bytes(), packing, parts))
    assert prepare(mixed, *options, "--out", tmp_path / "one") == 0
    monkeypatch.setattr("prepare.MIB", 50)
    assert prepare(twin, *options, "--unit_mb", "0.001", "--out", tmp_path / "many") == 0
    monkeypatch.undo()
    assert prepare(twin, *options, "--workers", "2", "--unit_mb", "0.001", "--out", tmp_path / "two") == 0
    one, many, two = (open_source(str(tmp_path / name), 1.0) for name in ("one", "many", "two"))
    for split in ("train", "val"):
        ids = getattr(one, split).read(0, len(getattr(one, split)))
        assert all(np.array_equal(getattr(other, split).read(0, len(ids) + 1), ids) for other in (many, two))
    sizes = [path.stat().st_size // 2 for path in (tmp_path / "many").glob("*.bin")]
    assert len(sizes) > 2 and max(sizes) < 2000 + max(3002, 4 * 50)      # a document may end behind the limit
    names = [entry["name"] for entry in json.loads((tmp_path / "many" / "metadata.json").read_text())["shards"]]
    for split in ("train", "val"):
        of_split = [name for name in names if name.startswith(split)]
        assert of_split == sorted(of_split)
    assert any("_00001.bin" in name for name in names) and data.main(["verify", str(tmp_path / "many")]) == 0


@pytest.mark.parametrize("call, count", [("fsync", 1), ("fsync", 5), ("replace", 3), ("replace", 9), ("replace", 12)])
def test_a_killed_prepare_of_packed_files_goes_on_and_ends_byte_for_byte_the_same(tmp_path, capfd, call, count):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):                 # of which each becomes about six shards of one unit
        rng = random.Random(name)
        lines = [json.dumps(dict(text=f"{rng.getrandbits(8000):x}")) for _ in range(100)]
        (tmp_path / name).write_bytes(gzip.compress("\n".join(lines).encode()))
    arguments = [str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.jsonl.gz"), "--unit_mb", "0.02", "--out"]
    assert prepare(*arguments, tmp_path / "undisturbed") == 0
    command = [sys.executable, "-c", KILLED, call, str(count), "prepare", "--workers", "1", *arguments, tmp_path / "o"]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert not (tmp_path / "o" / "metadata.json").exists() and prepare(*arguments, tmp_path / "o") == 0
    assert contents(tmp_path / "o") == contents(tmp_path / "undisturbed") and len(contents(tmp_path / "o")) > 12
    assert ("goes on; 1 of 2" in capfd.readouterr().out) == (count > 8)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.py"])
def test_a_packed_file_that_is_damaged_or_cut_off_is_named_and_leaves_no_shard(tmp_path, capsys, packing, name):
    rng, refused, path = random.Random(7), 0, tmp_path / (name + packing)
    raw = b"".join(b'{"text": "document %d, %d"}\n' % (i, rng.randrange(10 ** 9)) for i in range(300))
    sound = pack(raw, packing)
    argv = [path, *(["--ext", ".py"] if name == "a.py" else []), "--unit_mb", "0.001", "--out", tmp_path / "o"]
    for case in range(60):
        bad = bytearray(sound)
        if case % 3:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        else:
            bad = bad[:len(sound) - 1 - case // 3 * (len(sound) // 20)]
        path.write_bytes(bad)
        status = prepare(*argv)
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("prepare: ")]
        if status:
            refused += 1
            assert status == 2 and len(lines) == 1 and f"{path}:" in lines[0] and os.listdir(tmp_path) == [path.name]
        else:                                                 # in gzip's header, which nobody reads
            made = documents(tmp_path / "o", "train") + documents(tmp_path / "o", "val")
            assert sum(map(len, made)) == (len(raw) if name != "a.jsonl" else len(raw) - 300 * len(b'{"text": ""}\n'))
            assert packing == ".gz" and case % 3 and not lines
            shutil.rmtree(tmp_path / "o")
    assert refused > 50


def test_what_is_packed_and_empty_or_not_packed_at_all_is_named(tmp_path, capsys, packing):
    path = tmp_path / f"a.txt{packing}"
    for content, said in ((pack(b"", packing), "empty"), (b"", "empty"), (b"plain text", "cannot be unpacked")):
        path.write_bytes(content)
        assert prepare(path, "--out", tmp_path / "o") == 2 and os.listdir(tmp_path) == [path.name]
        assert f"{path}: {said}" in capsys.readouterr().err
    for name in ("a.parquet", "a.tar"):
        (tmp_path / (name + packing)).write_bytes(pack(b"x", packing))
        assert prepare(tmp_path / (name + packing), "--out", tmp_path / "o") == 2
        assert f"{name}{packing}: takes .txt, .jsonl, .ndjson, .parquet, all but the last" in capsys.readouterr().err
    path.write_bytes(pack(b"some text", packing))
    assert prepare(tmp_path, "--val_fraction", "0", "--out", tmp_path / "o") == 0
    assert f"1 .tar{packing} (" in (err := capsys.readouterr().err) and f"1 .parquet{packing} (" in err
    assert documents(tmp_path / "o", "train") == [b"some text"]
    assert prepare(path, "--ext", "text", "--out", tmp_path / "p") == 2                  # it is none as it stands


def test_what_a_packed_file_holds_does_not_fill_memory(tmp_path, packing, monkeypatch, capsys):
    """2 GB of zeros, and then a line of them, which is more than a line may have."""
    zeros = pack(bytes(1 << 20), packing)
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(zeros * 2000)
    tracemalloc.start()
    try:
        with open_input(str(path)) as file:
            assert sum(len(file.read(1 << 20)) for _ in range(64)) == 64 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        monkeypatch.setattr("prepare.LINE_LIMIT", 4 << 20)
        assert prepare(path, "--out", tmp_path / "o") == 2
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert "a line of more than 4,194,304 bytes" in capsys.readouterr().err


def test_without_a_library_for_zst_the_remedy_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl.zst").write_bytes(b"whatever")
    for name in ("compression", "backports", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    assert prepare(tmp_path, "--out", tmp_path / "o") == 2
    assert f'{tmp_path}/a.jsonl.zst: .zst needs backports.zstd; run: pip install -e ".[zstd]"' in (
        capsys.readouterr().err)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_progress_of_packed_files_goes_by_what_is_read_of_them_and_ends_at_all_of_it(
        tmp_path, monkeypatch, capsys, workers):
    rng, seen = random.Random(8), []
    for name in ("a.jsonl.gz", "b.txt.gz", "c.txt"):
        raw = b"".join(b'{"text": "%x"}\n' % rng.getrandbits(4000) for _ in range(800))
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)

    def add(progress, size, real=ProgressBar.add):
        assert not size or not seen or seen[-1] < progress.total            # it is complete once, at the end
        real(progress, size)
        seen.append(progress.done)
    monkeypatch.setattr(ProgressBar, "add", add)
    inputs = [tmp_path / name for name in ("a.jsonl.gz", "b.txt.gz", "c.txt")]
    assert data.main(["prepare", *map(str, inputs), "--workers", str(workers), "--unit_mb", "0.1", "--out",
                      str(tmp_path / "o")]) == 0
    a, b, c = (path.stat().st_size for path in inputs)
    assert seen == sorted(seen) and seen[-1] == a + 2 * b + c and (err := capsys.readouterr().err).count("100%") == 1
    assert workers > 1 or sum(done < a for done in seen) > 2 and sum(a < done < a + 2 * b for done in seen) > 4
    assert err.count("\n") == 1


def test_a_fault_in_one_file_ends_the_reading_of_the_others(tmp_path, capsys):
    """200 MB of zeros would have become shards before long."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": 5}\n'))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(bytes(1 << 20), 1) * 200)
    inputs = [str(tmp_path / name) for name in ("a.jsonl.gz", "b.txt.gz")]
    assert data.main(["prepare", *inputs, "--workers", "2", "--unit_mb", "0.00001", "--out", str(tmp_path / "o")]) == 2
    assert f"{tmp_path}/a.jsonl.gz:1: no object" in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_ctrl_c_ends_the_reading_of_packed_files_and_the_same_command_goes_on(tmp_path):
    for name in ("a.txt.gz", "b.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(bytes(1 << 20), 1) * 200)
    command = [sys.executable, "data.py", "prepare", tmp_path, "--workers", "2", "--unit_mb", "0.00001", "--out"]
    run = subprocess.Popen([*command, tmp_path / "o"], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("o/.train*.tmp"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    assert b"interrupted; the same command again goes on" in run.communicate()[1] and run.returncode == 130
    assert os.listdir(tmp_path / "o") == ["prepare.jsonl"]
