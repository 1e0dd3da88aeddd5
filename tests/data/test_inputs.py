"""The inputs of prepare: files, directories, standard input, packed files; and those that are refused."""

import gzip
import hashlib
import io
import json
import os
import random
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
from bad_data import mixed, no_waiting, quick_disk  # noqa: F401
from bad_data import KILLED, a_socket, complaint, device, documents, joined, limit, pipe, snapshot
from conftest import ROOT, contents, prepare
from spider import errors
from spider.console import ProgressBar
from spider.data.inputs import PACKED, import_zstd, open_input
from spider.data.shards import open_source


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


def test_a_mixed_folder_lists_what_is_skipped_and_how_many(mixed, tmp_path, capsys):
    for name in ("b.md", "c.md", "d.py", "Makefile", ".git/HEAD", "sub/.hidden.txt", "odd.\x07"):
        (mixed / name).parent.mkdir(exist_ok=True)
        (mixed / name).write_text("x")
    for i in range(9):
        (mixed / f"x.kind{i}").write_text("x")
    (mixed / "sub" / "again.txt").symlink_to(mixed / "a.txt")
    assert prepare(mixed, "--out", tmp_path / "o") == 0
    again, line, _ = capsys.readouterr().err.splitlines()
    assert again == (f"prepare: {mixed}: skipped {mixed}/sub/again.txt: link loops, or other names of files that are "
                     "read")
    assert line.startswith(f"prepare: {mixed}: skipped 3 .md ({mixed}/b.md, ...), 2 hidden ({mixed}/.git, ...), 1 ")
    assert line.count(" 1 ") == 6 and ", ...; use --ext to read other files" in line and r".\x07" in line
    assert prepare(mixed / "a.txt", "--out", tmp_path / "p") == 0 and "skipped" not in capsys.readouterr().err


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
    limit("MIB", 7, monkeypatch)                       # characters lie across what is read at a time
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
            assert ("name its format by --format" in capsys.readouterr().err) == (status == 2)
        for split in ("train", "val"):
            assert joined(tmp_path / f"{kind}--format{kind}", split) == joined(tmp_path / f"from_{kind}", split)
        assert len(documents(tmp_path / f"{kind}--formattxt", "train")) == 1
    for raw, said in ((b"\x1f\x8b\x08 and so on", "-: looks like gzip"), (b'{"text": 5}', "-: looks like JSON-lines")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        assert prepare("-", "--out", tmp_path / "p") == 2 and said in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "fine"}\n{"text": 5}')))
    assert prepare("-", "--format", "jsonl", "--out", tmp_path / "p") == 2
    assert "error: -:2: not an object with a string 'text'" in capsys.readouterr().err


def test_what_was_prepared_before_there_were_ext_and_format_is_recognised(mixed, tmp_path, capsys):
    """The fingerprint of plain inputs is what it was."""
    assert prepare(mixed, "--out", tmp_path / "o") == 0
    known = [[str(path), path.stat().st_size, path.stat().st_mtime_ns]
             for path in (mixed / "a.txt", mixed / "sub" / "b.jsonl")]
    fingerprint = hashlib.sha256(json.dumps([known, ["text", 0.1, 64_000_000]]).encode()).hexdigest()
    assert json.loads((tmp_path / "o" / "metadata.json").read_text())["fingerprint"] == fingerprint


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
    limit("MIB", 50, monkeypatch)
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
def test_a_killed_prepare_of_packed_files_resumes_and_ends_byte_for_byte_the_same(tmp_path, capfd, call, count):
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
    assert ("resuming; 1 of 2" in capfd.readouterr().out) == (count > 8)


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
    for content, said in ((pack(b"", packing), "empty"), (b"", "empty"), (b"plain text", "cannot be decompressed")):
        path.write_bytes(content)
        assert prepare(path, "--out", tmp_path / "o") == 2 and os.listdir(tmp_path) == [path.name]
        assert f"{path}: {said}" in capsys.readouterr().err
    for name in ("a.parquet", "a.tar"):
        (tmp_path / (name + packing)).write_bytes(pack(b"x", packing))
        assert prepare(tmp_path / (name + packing), "--out", tmp_path / "o") == 2
        supported = ".txt, .jsonl, .ndjson, .parquet, all but the last"
        assert f"{name}{packing}: supported are {supported}" in capsys.readouterr().err
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
        limit("LINE_LIMIT", 4 << 20, monkeypatch)
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
    assert f"{tmp_path}/a.jsonl.gz:1: not an object" in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_ctrl_c_ends_the_reading_of_packed_files_and_the_same_command_resumes(tmp_path):
    for name in ("a.txt.gz", "b.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(bytes(1 << 20), 1) * 200)
    command = [sys.executable, "data.py", "prepare", tmp_path, "--workers", "2", "--unit_mb", "0.00001", "--out"]
    run = subprocess.Popen([*command, tmp_path / "o"], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("o/.train*.tmp"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    assert b"interrupted; the same command again resumes" in run.communicate()[1] and run.returncode == 130
    assert os.listdir(tmp_path / "o") == ["prepare.jsonl"]


@pytest.mark.parametrize("make", [pipe, a_socket, device])
@pytest.mark.parametrize("name", ["in/b.txt", "in/b.jsonl", "in/b.parquet", "o/prepare.jsonl", "o/metadata.json"])
def test_what_is_no_file_among_the_inputs_is_named_and_never_waited_for(tmp_path, capsys, no_waiting, make, name):
    for folder in ("in", "o"):
        (tmp_path / folder).mkdir()
    (tmp_path / "in" / "a.txt").write_text("fine")
    make(tmp_path / name)
    for given in [tmp_path / "in"] + [tmp_path / name] * name.startswith("in"):
        line = complaint(capsys, "prepare", given, "--workers", "1", "--out", tmp_path / "o")
        assert f"{tmp_path / name} is a {make.__name__.removeprefix('a_')}, not a file: delete it" in line
    assert sorted(os.listdir(tmp_path / "in")) == sorted({"a.txt", *([] if name[0] == "o" else [name[3:]])})


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("gone"), lambda path: path.symlink_to(path.name)],
                         ids=["dangling", "loop"])
def test_a_link_to_nowhere_among_the_inputs_is_named(tmp_path, capsys, make):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("fine")
    make(tmp_path / "in" / "b.txt")
    before = snapshot(tmp_path)
    line = complaint(capsys, "prepare", tmp_path / "in", "--workers", "1", "--out", tmp_path / "o")
    assert f"{tmp_path}/in/b.txt" in line and snapshot(tmp_path) == before
