"""Shards from inputs: the stream, kills and full disks on the way, the journal."""

import fcntl
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import data
from bad_data import mixed, quick_disk  # noqa: F401
from bad_data import KILLED, LINE, PROGRESS, complaint, documents, joined, limit, nodes, snapshot
from conftest import ROOT, SHARED, contents, prepare
from fuzzing import JUNK, mutated
from spider.data import prepare as preparing
from spider.data.prepare import read_journal
from spider.data.shards import open_data
from spider.files import durable
from tokenizer import VOCAB_SIZE


SHAKESPEARE = SHARED / "tinyshakespeare.txt"


def test_a_worker_starts_without_torch():
    """It imports data.py and what that imports."""
    code = "import sys, data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.skipif(
    not SHAKESPEARE.exists(), reason=f"{SHAKESPEARE} is not there"))])
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
    limit("MIB", 50, monkeypatch)                      # in workers it stays what it is
    assert prepare(mixed, "--out", tmp_path / "many", "--unit_mb", unit_mb, "--workers", workers) == 0
    assert len(list((tmp_path / "one").glob("*.bin"))) == 2 and len(list((tmp_path / "many").glob("*.bin"))) > 15
    for split in ("train", "val"):
        assert joined(tmp_path / "one", split) == joined(tmp_path / "many", split) != b""
    one, many = (json.loads((tmp_path / out / "metadata.json").read_text()) for out in ("one", "many"))
    assert one["totals"] == many["totals"]
    names = [entry["name"] for entry in many["shards"] if entry["split"] == "train"]
    assert names == sorted(names)


def test_the_same_command_again_does_nothing_and_other_inputs_are_refused(mixed, tmp_path, capsys):
    assert prepare(mixed, "--out", tmp_path / "o") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}
    (tmp_path / "o" / "prepare.jsonl").write_text("a kill may leave it")
    assert prepare(mixed, "--out", tmp_path / "o") == 0
    assert "already prepared" in capsys.readouterr().out
    assert prepare(mixed, "--out", tmp_path / "o", "--val_fraction", "0.2") == 2
    (mixed / "a.txt").write_text("changed")
    assert prepare(mixed, "--out", tmp_path / "o") == 2
    assert capsys.readouterr().err.count("use another --out, or delete it") == 2
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}


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
    assert kept >= len(shards) - 2 and ("resuming" in capfd.readouterr().out) == (kept > 0)


def test_a_journal_line_cut_short_and_a_lost_shard_are_done_again(mixed, tmp_path, monkeypatch):
    arguments, journal = [mixed, "--unit_mb", "0.02", "--out"], tmp_path / "o" / "prepare.jsonl"
    assert prepare(*arguments, tmp_path / "undisturbed") == 0
    monkeypatch.setattr("spider.data.prepare.durable", lambda path, real=durable:
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


def test_two_that_prepare_into_one_directory_do_not_meet(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("other text")
    command = [sys.executable, "data.py", "prepare", "-", "--workers", "1", "--out", tmp_path / "o"]
    first, deadline = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE), time.monotonic() + 60
    while not (tmp_path / "o" / ".stdin.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for given in (tmp_path / "a.txt", "-"):                   # the second is refused before it reads anything
        assert prepare(given, "--out", tmp_path / "o") == 2
        assert capsys.readouterr().err == (f"data.py: error: {tmp_path}/o: another prepare is using it: wait for it, "
                                           "or use another --out\n")
    assert os.listdir(tmp_path / "o") == [".stdin.txt"]
    first.communicate(b"a text")
    assert first.returncode == 0 and documents(tmp_path / "o", "train") == [b"a tex"]
    assert prepare(tmp_path / "a.txt", "--out", tmp_path / "o") == 2    # the lock is free again
    assert "has shards of other inputs" in capsys.readouterr().err


def test_a_directory_that_another_prepare_has_just_deleted_is_not_worked_in(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / "o").rmdir())
    assert prepare(tmp_path / "a.txt", "--out", tmp_path / "o") == 2
    assert "another prepare is using it" in capsys.readouterr().err and os.listdir(tmp_path) == ["a.txt"]


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert prepare(tmp_path / "a.txt", "--out", tmp_path / "o") == 0
    assert f"{tmp_path}/o cannot be locked (Operation not supported): make sure" in capsys.readouterr().err


def test_what_fails_leaves_no_directory_behind(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    assert prepare(tmp_path / "a.txt", "--out", tmp_path / "new" / "below" / "o") == 2
    assert os.listdir(tmp_path) == ["a.txt"]


BAD = {
    "broken line": ({"x.jsonl": 2 * LINE + b'\n{"text": "fi\n'}, ["x.jsonl"], ["x.jsonl:4: not JSON", "offset 35"]),
    "no object": ({"x.jsonl": LINE + b'["text"]\n'}, ["x.jsonl"], ["x.jsonl:2: not an object", "'text'"]),
    "no field": ({"x.jsonl": LINE}, ["x.jsonl", "--field", "body"], ["x.jsonl:1:", "'body'", "--field"]),
    "no string": ({"x.jsonl": LINE + b'{"text": 5}'}, ["x.jsonl"], ["x.jsonl:2: not an object with a string 'text'"]),
    "not UTF-8": ({"x.jsonl": LINE + b'{"text": "\xff"}\n'}, ["x.jsonl"], ["x.jsonl:2: not UTF-8 at byte 10"]),
    "surrogate": ({"x.jsonl": b'{"text": "ab\\ud800"}'}, ["x.jsonl"], ["x.jsonl:1: a lone surrogate at character 2"]),
    "deep": ({"x.jsonl": b"[" * 200_000}, ["x.jsonl"], ["x.jsonl:1: "]),
    "long line": ({"x.jsonl": LINE + b'{"text": "' + b"x" * 500}, ["x.jsonl"], ["x.jsonl:2: a line of more than 500"]),
    "long blank": ({"x.jsonl": LINE + b" " * 501}, ["x.jsonl"], ["x.jsonl:2: a line of more than 500"]),
    "only blank": ({"x.jsonl": b"\n \n"}, ["x.jsonl"], ["x.jsonl: no document"]),
    "empty": ({"x.txt": b""}, ["x.txt"], ["x.txt: empty"]),
    "missing": ({}, ["x.txt"], ["x.txt: No such file"]),
    "other kind": ({"x.csv": b"a"}, ["x.csv"], ["x.csv: supported are .txt, .jsonl, .ndjson, .parquet"]),
    "nothing in it": ({"d/x.csv": b"a"}, ["d"], ["d: supported are .txt"]),
    "fraction": ({"x.txt": b"a"}, ["x.txt", "--val_fraction", "1"], ["--val_fraction", "below 1"]),
    "negative": ({"x.txt": b"a"}, ["x.txt", "--val_fraction", "-0.1"], ["--val_fraction"]),
    "no fraction": ({"x.txt": b"a"}, ["x.txt", "--val_fraction", "nan"], ["--val_fraction"]),
    "no number": ({"x.txt": b"a"}, ["x.txt", "--val_fraction", "x"], ["--val_fraction", "'x'"]),
    "no workers": ({"x.txt": b"a"}, ["x.txt", "--workers", "0"], ["--workers"]),
    "workers": ({"x.txt": b"a"}, ["x.txt", "--workers", "100000"], ["--workers", "at most 1024"]),
    "no size": ({"x.txt": b"a"}, ["x.txt", "--unit_mb", "0"], ["--unit_mb"]),
    "no input": ({}, [], ["INPUT"]),
    "no ending": ({"x.py": b"a"}, ["x.py", "--ext", "py"], ["--ext", "'py'", ".py,.md", "text"]),
    "empty ending": ({"x.py": b"a"}, ["x.py", "--ext", ".py,"], ["--ext", "'.py,'"]),
    "lines by ext": ({"x.jsonl": LINE}, ["x.jsonl", "--ext", ".md,.jsonl"], ["--ext", ".jsonl would be read as"]),
    "other ending": ({"x.txt": b"a"}, ["x.txt", "--ext", ".py,.md"], ["x.txt: nothing in it matches --ext .py,.md"]),
    "none of them": ({"d/x.txt": b"a", "d/y.py": b""}, ["d", "--ext", ".py"], ["d: nothing in it matches --ext .py"]),
    "no stdin": ({"x.txt": b"a"}, ["x.txt", "--format", "jsonl"], ["--format", "- is not among the inputs"]),
    "no format": ({"x.txt": b"a"}, ["-", "--format", "csv"], ["--format", "'csv'", "jsonl"]),
    "unknown flag": ({"x.txt": b"a"}, ["x.txt", "--fast"], ["--fast"]),
}


@pytest.mark.parametrize("files, arguments, said", BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2_and_leaves_no_shard(tmp_path, monkeypatch, capsys, files, arguments, said):
    monkeypatch.chdir(tmp_path)
    limit("LINE_LIMIT", 300_000 if "deep" in os.environ["PYTEST_CURRENT_TEST"] else 500, monkeypatch)
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    assert data.main(["prepare", "--workers", "1", "--out", "o", *arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("prepare: ")]   # progress is no error
    assert len(lines) == 1 and all(part in lines[0] for part in said), err
    assert not Path("o").exists() or os.listdir("o") == ["prepare.jsonl"]


def test_a_full_disk_is_one_line_that_names_the_shard_and_the_command_resumes(mixed, tmp_path, monkeypatch, capsys):
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
    assert prepare(*arguments) == 0 and "resuming; 2 of" in capsys.readouterr().out


def test_a_journal_of_any_content_is_named_or_its_units_are_done_again(tmp_path, monkeypatch, capsys):
    rng, out = random.Random(13), tmp_path / "o"
    (tmp_path / "a.txt").write_text("some text, " * 300)
    argv = ["prepare", str(tmp_path / "a.txt"), "--workers", "1", "--unit_mb", "0.001", "--out"]
    assert data.main([*argv, str(tmp_path / "undisturbed")]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(preparing, "durable", lambda path, real=durable:
                        real(path) if path.name == "prepare.jsonl" else sys.exit("killed before the end"))
        with pytest.raises(SystemExit):
            data.main([*argv, str(out)])
    killed, done, refused = snapshot(out), snapshot(tmp_path / "undisturbed"), 0
    raw = killed[out / "prepare.jsonl"]
    records = [json.loads(line) for line in raw.splitlines()]
    assert len(records) > 3
    numbers = ["1", "[1]", "9" * 4300, "9" * 5000, "[" * 100_000, "1e999", "NaN", "null", "{}", "\udcff", " ", "\0"]
    for case in range(400):
        match case % 4:
            case 0: bad = mutated(rng, raw)
            case 1:
                lines = [json.dumps(record).encode() for record in records]
                lines[rng.randrange(len(lines))] = rng.choice(numbers).encode("utf-8", "surrogateescape")
                bad = b"\n".join(lines)
            case _:
                tree = json.loads(json.dumps(records))
                *above, last = rng.choice([*nodes(tree)])
                inside = tree
                for name in above:
                    inside = inside[name]
                inside[last] = rng.choice(JUNK + [json.loads("9" * 4300), 1 << 62, records[1]["shards"], records[2]])
                bad = b"\n".join(json.dumps(record).encode() for record in tree)
        for path, content in killed.items():
            path.write_bytes(content)
        (out / "prepare.jsonl").write_bytes(bad)
        capsys.readouterr()
        if status := data.main([*argv, str(out)]):
            refused += 1
            lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(PROGRESS)]
            assert status == 2 and len(lines) == 1 and f"{out}: has shards of other" in lines[0], (bad, lines)
        else:
            made = {path.name: content for path, content in snapshot(out).items()}
            assert made == {path.name: content for path, content in done.items()} or case % 4 != 1, bad
            shutil.rmtree(out)
            out.mkdir()
    assert 5 < refused < 200


def test_an_input_that_changes_while_it_is_prepared_is_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')

    def cut(*args, real=preparing.write_shards):
        path.write_text('{"text": "one"}\n')
        return real(*args)
    monkeypatch.setattr(preparing, "write_shards", cut)
    line = complaint(capsys, "prepare", path, "--workers", "1", "--out", tmp_path / "o")
    assert "a.jsonl: changed while it was prepared" in line and not (tmp_path / "o" / "metadata.json").exists()
