"""Bad input of every kind, thousands of cases: one line that names it, status 2, nothing written and nothing lost."""

import json
import math
import os
import random
import shutil
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import bench
import data
import sample
import train
from conftest import measured, run_flags
from fuzzing import JUNK, mutated
from spider import errors, files
from spider.console import one_line
from spider.data import prepare, shards
from spider.data.loader import Loader
from spider.data.shards import Shard, check, find_shards, open_data, read_metadata
from spider.errors import UsageError
from spider.files import durable
from spider.flags import number
from spider.model.config import SpiderConfig
from spider.training import curves
from spider.training.plan import apply_settings
from spider.training.ranks import World
from tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE
from train import FLAGS, parse_args

PROGRESS = "prepare: ", "verify: ", "standard input: "
TEXTS = ["", " ", "-", "--", "-1", "+-3", "--5", "nan", "inf", "-inf", "1e400", "1e-400", "0x10", "1_0", "2.5",
         "9" * 5000, "\u00b2", "\u0663", "\u2167", "a\nb", "\x1b[2J", "\udcff", "\u202e", "\U0001f577", "None", "true",
         "1,2", "a b"]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """No waiting for the disk: thousands of cases, and no power cut among them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def snapshot(directory: Path) -> dict[Path, object]:
    """All that is in and below a directory: contents of files, targets of links."""
    return {path: os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            for path in directory.rglob("*")}


def complaint(capsys, *argv) -> str:
    """What data.py says against a command line; fails unless that is one line on stderr, and the status 2."""
    status = data.main([*map(str, argv)])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith(PROGRESS)]
    assert (status, len(lines), out) == (2, 1, "") and lines[0].startswith("data.py: error: "), (argv, status, err, out)
    return lines[0]


def text(rng: random.Random, length: int) -> str:
    """Unicode of all kinds, control characters and lone surrogates included."""
    return "".join(chr(rng.choice((rng.randrange(1, 128), rng.randrange(1, 0x3000), rng.randrange(1, 0x110000))))
                   for _ in range(rng.randrange(length)))


# ---------------------------------------------------------------------------------------------------------------------
# Shards

@pytest.fixture
def prepared(tmp_path, capsys) -> Path:
    """A directory with five shards and their metadata."""
    lines = [json.dumps(dict(text=f"document {i} " + "x" * (i % 70))) + "\n" for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    assert data.main(["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "data" / "web"), "--workers", "1",
                      "--unit_mb", "0.001"]) == 0
    capsys.readouterr()
    assert len(list(tmp_path.glob("data/web/*.bin"))) > 4
    return tmp_path / "data"


def too_high(rng, path, size):
    i, value = rng.randrange(size // 2), rng.choice((VOCAB_SIZE, rng.randrange(VOCAB_SIZE, 1 << 16)))
    path.write_bytes(path.read_bytes()[:2 * i] + value.to_bytes(2, "little") + path.read_bytes()[2 * i + 2:])
    return f": byte offset {2 * i}: id {value} is above 271"


def odd(rng, path, size):
    os.truncate(path, end := 2 * rng.randrange(size // 2) + 1)
    return f"byte offset {end}, but metadata.json says {size}", f"half an id at byte offset {end - 1}"


def cut_off(rng, path, size):
    os.truncate(path, end := 2 * rng.randrange(1, size // 2))
    return f"byte offset {end}, but metadata.json says {size}", None


def too_long(rng, path, size):
    os.truncate(path, end := size + 2 * rng.randrange(1, 99))
    return f"byte offset {end}, but metadata.json says {size}", None


def empty(rng, path, size):
    os.truncate(path, 0)
    return "empty (byte offset 0)"


def lost(rng, path, size):
    path.unlink()
    return "missing, though metadata.json lists it", None


def directory(rng, path, size):
    path.unlink()
    path.mkdir()
    return "Is a directory"


def dangling(rng, path, size):
    path.unlink()
    path.symlink_to("gone")
    return "No such file"


def looped(rng, path, size):
    path.unlink()
    path.symlink_to(path.name)
    return "Too many levels of symbolic links"


@pytest.mark.parametrize("described", [True, False], ids=["with metadata", "without metadata"])
@pytest.mark.parametrize("spoil", [too_high, odd, cut_off, too_long, empty, lost, directory, dangling, looped])
def test_a_damaged_shard_is_named_by_whatever_reads_it(prepared, capsys, spoil, described):
    if not described:
        (prepared / "web" / "metadata.json").unlink()
    sound, rng = snapshot(prepared), random.Random(0)
    for _ in range(12):
        path = rng.choice(sorted(prepared.glob("web/*.bin")))
        said = spoil(rng, path, path.stat().st_size)
        said = said if isinstance(said, str) else said[not described]
        damaged = snapshot(prepared)
        for reader in [] if said is None else [["verify", prepared], ["show", prepared, "--seq_len", "9"]]:
            if spoil is too_high and reader[0] == "show":     # training looks at all ids first
                with pytest.raises(errors.DataError) as fault:
                    check(open_data(str(prepared)))
                line = str(fault.value)
            else:
                line = complaint(capsys, *reader)
            assert str(path) in line and said in line, line
        assert snapshot(prepared) == damaged
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.write_bytes(sound[path])
    assert snapshot(prepared) == sound


def test_verify_notices_any_altered_bit(prepared, capsys):
    rng = random.Random(1)
    for _ in range(300):
        path = rng.choice(sorted(prepared.glob("web/*.bin")))
        sound = path.read_bytes()
        altered = bytearray(sound)
        altered[rng.randrange(len(sound))] ^= 1 << rng.randrange(8)
        path.write_bytes(altered)
        line = complaint(capsys, "verify", prepared)
        assert f"{path}: " in line and ("SHA-256" in line or "is above 271" in line), line
        path.write_bytes(sound)


@pytest.mark.skipif(os.name != "posix", reason="modes")
@pytest.mark.parametrize("name", ["web/b.bin", "web", "web/metadata.json"])
def test_what_may_not_be_read_is_named_and_not_passed_over(prepared, tmp_path, name):
    root = tmp_path.parent.parent                             # pytest's directories are for their user alone
    modes = {path: path.stat().st_mode for path in (root, tmp_path.parent, tmp_path)}
    (prepared / "web" / "b.bin").write_bytes(bytes(20))
    (prepared / "a.bin").write_bytes(bytes(20))               # there is something else to train on
    user = os.geteuid()
    try:
        for path in modes:
            path.chmod(0o755)
        (prepared / name).chmod(0)
        os.seteuid(user or 65534)                             # root may read everything
        with pytest.raises(errors.DataError) as fault:
            open_data(str(prepared))
        assert str(fault.value) == f"{prepared / name}: Permission denied"
    finally:
        os.seteuid(user)
        (prepared / name).chmod(0o755)
        for path, mode in modes.items():
            path.chmod(mode)


# ---------------------------------------------------------------------------------------------------------------------
# Links, pipes, sockets and devices

def test_link_loops_end_and_a_file_of_several_names_is_read_once(prepared, tmp_path, capsys):
    web, sound = prepared / "web", streams(prepared)
    (tmp_path / "far" / "deep").mkdir(parents=True)
    np.arange(9, dtype="<u2").tofile(tmp_path / "far" / "deep" / "x.bin")
    for link, target in [("loop", "."), ("web/up", ".."), ("web/self", "../web"), ("above", "../.."), ("a", "web"),
                         ("again.bin", sorted(path.name for path in web.glob("*.bin"))[0]), ("z", tmp_path / "far"),
                         ("../far/deep/round", tmp_path / "far"), ("../far/deep/data", prepared)]:
        (prepared / link).symlink_to(Path("web", target) if link == "again.bin" else target)
    (prepared / "hard.bin").hardlink_to(web / "train-00000.bin")
    far = [(f"{prepared}/z/deep/x.bin", [*range(9)])]         # what has metadata keeps it, whatever else leads there
    assert streams(prepared) == [sound[0] + far, sound[1]]
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{prepared}: skipped {prepared}/") and "and 6 more: link loops, or" in line
    for reader in (["verify", prepared], ["show", prepared, "--seq_len", "9"]):
        assert data.main([*map(str, reader)]) == 0
        assert capsys.readouterr().err.splitlines()[0] == line
    (prepared / "hard.bin").unlink()
    for path in prepared.rglob("*"):
        path.unlink() if path.is_symlink() and path.name != "loop" else None
    assert streams(prepared) == sound
    assert capsys.readouterr().err.startswith(f"{prepared}: skipped {prepared}/loop: link loops")


def test_whatever_the_links_every_file_is_found_once_and_at_its_own_place(tmp_path, capsys):
    rng = random.Random(12)
    for case in range(60):
        root, folders, files = tmp_path / str(case), [tmp_path / str(case)], set()
        root.mkdir()
        for i in range(12):
            path = rng.choice(folders) / f"{rng.choice('abc')}{i}"
            match rng.randrange(4):
                case 0:
                    path.mkdir()
                    folders.append(path)
                case 1 | 2: path.symlink_to(rng.choice([root.parent, *folders]), target_is_directory=True)
                case 3:
                    np.full(5, i, "<u2").tofile(path.with_suffix(".bin"))
                    files.add(str(path.with_suffix(".bin")))
        if files:
            assert {path for path, _, _ in find_shards(str(root))} == files
            shutil.rmtree(root)                               # or a link to all of them leads to this one
    capsys.readouterr()


def pipe(path):
    os.mkfifo(path)


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))                    # 107 bytes at most


def device(path):
    path.symlink_to("/dev/zero")


@pytest.fixture
def no_waiting():
    """What waits for ever fails."""
    def fail(*_):
        raise TimeoutError("waits")
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", [pipe, a_socket, device])
@pytest.mark.parametrize("name", ["a.bin", "web/train-00001.bin", "web/metadata.json"])
def test_what_is_no_file_among_the_shards_is_named_and_never_waited_for(prepared, capsys, no_waiting, make, name):
    (prepared / name).unlink(missing_ok=True)
    make(prepared / name)
    for reader in (["verify", prepared], ["show", prepared, "--seq_len", "9"]):
        line = complaint(capsys, *reader)
        assert f"{prepared / name}: a {make.__name__.removeprefix('a_')}, no file: delete it" in line


@pytest.mark.parametrize("make", [pipe, a_socket, device])
@pytest.mark.parametrize("name", ["in/b.txt", "in/b.jsonl", "in/b.parquet", "o/prepare.jsonl", "o/metadata.json"])
def test_what_is_no_file_among_the_inputs_is_named_and_never_waited_for(tmp_path, capsys, no_waiting, make, name):
    for folder in ("in", "o"):
        (tmp_path / folder).mkdir()
    (tmp_path / "in" / "a.txt").write_text("fine")
    make(tmp_path / name)
    for given in [tmp_path / "in"] + [tmp_path / name] * name.startswith("in"):
        line = complaint(capsys, "prepare", given, "--workers", "1", "--out", tmp_path / "o")
        assert f"{tmp_path / name}: a {make.__name__.removeprefix('a_')}, no file: delete it" in line
    assert sorted(os.listdir(tmp_path / "in")) == sorted({"a.txt", *([] if name[0] == "o" else [name[3:]])})


# ---------------------------------------------------------------------------------------------------------------------
# Shards that change during the run

def shortened(rng, path):
    os.truncate(path, rng.randrange(path.stat().st_size))


def lengthened(rng, path):
    with open(path, "ab") as file:
        file.write(bytes(rng.randrange(1, 9)))


def altered(rng, path):
    with open(path, "r+b") as file:
        file.seek(rng.randrange(path.stat().st_size))
        file.write(b"\0")


def replaced(rng, path):
    (path.parent / "new").write_bytes(path.read_bytes())
    os.replace(path.parent / "new", path)


def removed(rng, path):
    path.unlink()


@pytest.mark.parametrize("change", [shortened, lengthened, altered, replaced, removed])
def test_a_shard_that_changes_during_the_run_stops_it_and_the_same_order_goes_on_when_it_is_back(tmp_path, change):
    rng, paths, g = random.Random(2), [tmp_path / f"{i}.bin" for i in range(4)], np.arange(48)
    for case in range(60):
        for i, path in enumerate(paths):
            path.unlink(missing_ok=True)
            np.full(100, i, "<u2").tofile(path)
            os.utime(path, ns=(case, case))                   # or the clock's tick could hide a change
        loader = Loader(open_data(str(tmp_path)), 8, case)
        before = [part.tolist() for part in loader.rows(g)]
        path = rng.choice(paths[:3])
        change(rng, path)
        with pytest.raises(errors.DataError) as fault:
            loader.micro_batch(0, 0, 48)
        line = str(fault.value)
        assert line.startswith(f"{path}: changed during the run (") and "same command" in line and "\n" not in line
        others = [i for i in g if before[0][i][0] not in (paths.index(path), paths.index(path) - 1)]
        assert loader.rows(others)[0].tolist() == [before[0][i] for i in others]        # they were not touched
        np.full(100, paths.index(path), "<u2").tofile(path)
        assert [part.tolist() for part in Loader(open_data(str(tmp_path)), 8, case).rows(g)] == before


def test_a_shard_that_changes_while_a_batch_is_read_is_noticed(tmp_path, monkeypatch):
    path, checks = tmp_path / "a.bin", []
    np.zeros(100, "<u2").tofile(path)
    loader = Loader(open_data(str(tmp_path)), 8, 0)

    def check(shard, real=Shard.check_unchanged):
        real(shard)
        checks.append(shard)
        os.utime(path, ns=(len(checks), 0))
    monkeypatch.setattr(Shard, "check_unchanged", check)
    with pytest.raises(errors.DataError, match="a.bin: changed during the run"):
        loader.micro_batch(0, 0, 4)
    assert len(checks) == 1


# ---------------------------------------------------------------------------------------------------------------------
# metadata.json

def streams(spec: Path) -> list:
    [found] = open_data(str(spec))
    return [[(shard.path, shard.ids.tolist()) for shard in stream.shards] for stream in (found.train, found.val)]


def nodes(value, path=()):
    """The paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in items:
        yield *path, name
        yield from nodes(below, (*path, name))


def test_damaged_metadata_is_named_or_harmless(prepared, capsys):
    """Names of shards that say nothing: metadata that is passed over in silence gives other streams."""
    folder, rng, named = prepared / "web", random.Random(3), 0
    metadata = json.loads((folder / "metadata.json").read_text())
    for i, entry in enumerate(metadata["shards"]):
        (folder / entry["name"]).rename(folder / f"{i}.bin")
        entry["name"] = f"{i}.bin"
    raw, everywhere = json.dumps(metadata).encode(), list(nodes(metadata))
    (folder / "metadata.json").write_bytes(raw)
    sound = streams(prepared)
    assert len(sound[1]) > 0
    for case in range(1000):
        if case % 2:
            bad = mutated(rng, raw)
        else:
            tree = json.loads(raw)
            *above, last = rng.choice(everywhere)
            inside = tree
            for name in above:
                inside = inside[name]
            if case % 4 or not isinstance(inside, dict):
                inside[last] = rng.choice(JUNK)
            else:
                inside["no " + last] = inside.pop(last)
            bad = json.dumps(tree).encode()
        (folder / "metadata.json").write_bytes(bad)
        try:
            assert streams(prepared) == sound, bad
        except errors.DataError as fault:
            named += 1
            line = str(fault)
            assert line.startswith(f"{folder}{os.sep}") and ("metadata.json" in line or ".bin: " in line), (bad, line)
            if case % 10 == 0:
                before = snapshot(prepared)
                assert one_line(line) in complaint(capsys, "show", prepared, "--seq_len", "9")
                assert snapshot(prepared) == before
    assert named > 500


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("gone"), lambda path: path.write_bytes(b"["
                                  * 200_000)], ids=["directory", "dangling", "deep"])
def test_metadata_that_is_no_file_is_not_passed_over(prepared, capsys, make):
    path = prepared / "web" / "metadata.json"
    path.unlink()
    make(path)
    assert f"{path}: " in complaint(capsys, "verify", prepared)


@pytest.mark.parametrize("ids", ["1e3", "true", "-1", "9" * 4299, "9" * 5000, "1" + "0" * 30])
def test_a_count_in_metadata_that_is_none_is_named(prepared, capsys, ids):
    """The double of a number of 4299 digits has one more than Python prints."""
    path = prepared / "web" / "metadata.json"
    path.write_text(path.read_text().replace('"ids": ', '"ids": ' + ids + ', "": ', 3))
    assert f"{path}: " in complaint(capsys, "verify", prepared)


def test_a_record_without_an_end_is_named_in_bounded_memory(prepared, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shards, "RECORD_LIMIT", 2000)
    path = prepared / "web" / "metadata.json"
    path.write_text(" " * 2001)
    assert f"{path}: longer than 2,000 bytes" in complaint(capsys, "verify", prepared)
    (prepared / "web" / "prepare.jsonl").write_text(" " * 2001)
    assert "prepare.jsonl: longer than 2,000 bytes" in complaint(
        capsys, "prepare", tmp_path / "a.jsonl", "--workers", "1", "--out", prepared / "web")


# ---------------------------------------------------------------------------------------------------------------------
# prepare.jsonl

def test_a_journal_of_any_content_is_named_or_its_units_are_done_again(tmp_path, monkeypatch, capsys):
    rng, out = random.Random(13), tmp_path / "o"
    (tmp_path / "a.txt").write_text("some text, " * 300)
    argv = ["prepare", str(tmp_path / "a.txt"), "--workers", "1", "--unit_mb", "0.001", "--out"]
    assert data.main([*argv, str(tmp_path / "undisturbed")]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(files, "durable", lambda path, real=durable:
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
            assert status == 2 and len(lines) == 1 and f"{out}: holds shards from other" in lines[0], (bad, lines)
        else:
            made = {path.name: content for path, content in snapshot(out).items()}
            assert made == {path.name: content for path, content in done.items()} or case % 4 != 1, bad
            shutil.rmtree(out)
            out.mkdir()
    assert 5 < refused < 200


# ---------------------------------------------------------------------------------------------------------------------
# Inputs of prepare

LIMIT = 2000


def bad_line(rng: random.Random) -> tuple[bytes, str]:
    """A line that is no document, and what is said of it."""
    good = json.dumps(dict(id=5, text="a word " + text(rng, 20).encode("utf-8", "ignore").decode())).encode()
    match rng.randrange(8):
        case 0: return good[:rng.randrange(1, len(good))], "not JSON"
        case 1: return good.replace(b'"text"', b'"body"'), "no object with a string 'text'"
        case 2: return json.dumps(dict(text=rng.choice(JUNK[:7] + JUNK[-5:]))).encode(), "no object with a string"
        case 3: return json.dumps(rng.choice(JUNK)).encode(), "no object with a string"
        case 4: return good[:-4] + rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80")) + good[-4:], "not UTF-8 at byte"
        case 5: return good[:-2] + b'\\ud8%02x"}' % rng.randrange(256), "a lone surrogate at character"
        case 6: return good[:-2] + b"x" * rng.randrange(LIMIT, 2 * LIMIT) + b'"}', f"a line of more than {LIMIT:,} byte"
        case 7: return rng.randbytes(rng.randrange(1, 9)).replace(b"\n", b"") + b"\xfe", "not UTF-8 at byte"


def test_a_bad_json_line_is_named_by_its_number_and_offset(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "LINE_LIMIT", LIMIT)
    rng, path = random.Random(4), tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    for _ in range(500):
        bad, said = bad_line(rng)
        lines = [rng.choice((b"", b"  ", b'{"text": "fine"}')) for _ in range(rng.randrange(6))]
        lines.insert(number := rng.randrange(len(lines) + 1), bad)
        path.write_bytes(b"\n".join(lines) + b"\n" * rng.randrange(2))
        before = snapshot(tmp_path)
        line = complaint(capsys, "prepare", path.parent, "--workers", "1", "--out", tmp_path / "o")
        offset = sum(len(other) + 1 for other in lines[:number])
        assert f"{path}:{number + 1}: " in line and f"(the line at byte offset {offset})" in line and said in line, line
        assert snapshot(tmp_path) == before


def test_mutated_json_lines_are_named_or_prepared(tmp_path, capsys):
    rng, path = random.Random(5), tmp_path / "a.jsonl"
    raw = b"".join(json.dumps(dict(text=f"document {i} \u00e4")).encode() + b"\n" for i in range(4))
    refused = 0
    for _ in range(300):
        path.write_bytes(mutated(rng, raw))
        before = snapshot(tmp_path)
        argv = ["prepare", str(path), "--workers", "1", "--val_fraction", "0", "--out", str(tmp_path / "o")]
        status = data.main(argv)
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(PROGRESS)]
        if status:
            refused += 1
            assert status == 2 and len(lines) == 1 and f"{path}:" in lines[0] and snapshot(tmp_path) == before, lines
        else:
            documents = [json.loads(line)["text"] for line in path.read_bytes().split(b"\n") if line.strip()]
            ids = np.fromfile(tmp_path / "o" / "train-00000.bin", "<u2").tolist()
            assert ids == [i for document in documents for i in (BOS_ID, *document.encode(), EOS_ID)]
            shutil.rmtree(tmp_path / "o")
    assert 100 < refused < 300


def test_a_parquet_file_without_the_column_or_damaged_is_named(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the extra: pip install -e '.[parquet]'")
    import pyarrow.parquet as parquet
    rng, path, refused = random.Random(6), tmp_path / "a.parquet", 0
    table = pyarrow.table(dict(id=range(50), text=[f"row {i} \u00e4" for i in range(50)], part=[b"x", None] * 25))
    parquet.write_table(table, path, write_page_checksum=True)
    sound, argv = path.read_bytes(), ["prepare", str(path), "--workers", "1", "--out", str(tmp_path / "o"), "--field"]
    for field in ("body", "id", "part", "", "a\nb", *(text(rng, 9) or "no" for _ in range(30))):
        line = complaint(capsys, *argv, field)
        assert f"{path}: no string column" in line and "text (string)" in line and len(os.listdir(tmp_path)) == 1
    assert data.main([*argv, "text"]) == 0
    shards = [entry["sha256"] for entry in read_metadata(tmp_path / "o")["shards"]]
    shutil.rmtree(tmp_path / "o")
    for case in range(250):
        path.write_bytes(mutated(rng, sound) if case else sound.replace(b"part", b"\x80art"))  # a name, no UTF-8
        capsys.readouterr()
        status = data.main([*argv, "text"])
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(PROGRESS)]
        if status:
            refused += 1
            assert status == 2 and len(lines) == 1 and f"{path}: " in lines[0] and len(os.listdir(tmp_path)) == 1, lines
        else:                                                 # the damage was to what is not read
            assert [entry["sha256"] for entry in read_metadata(tmp_path / "o")["shards"]] == shards
            shutil.rmtree(tmp_path / "o")
    assert refused > 120


def test_an_input_that_changes_while_it_is_prepared_is_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')

    def cut(*args, real=prepare.write_shards):
        path.write_text('{"text": "one"}\n')
        return real(*args)
    monkeypatch.setattr(prepare, "write_shards", cut)
    line = complaint(capsys, "prepare", path, "--workers", "1", "--out", tmp_path / "o")
    assert "a.jsonl: changed while it was prepared" in line and not (tmp_path / "o" / "metadata.json").exists()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("gone"), lambda path: path.symlink_to(path.name)],
                         ids=["dangling", "loop"])
def test_a_link_to_nowhere_among_the_inputs_is_named(tmp_path, capsys, make):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("fine")
    make(tmp_path / "in" / "b.txt")
    before = snapshot(tmp_path)
    line = complaint(capsys, "prepare", tmp_path / "in", "--workers", "1", "--out", tmp_path / "o")
    assert f"{tmp_path}/in/b.txt" in line and snapshot(tmp_path) == before


@pytest.mark.slow
def test_a_line_of_a_gigabyte_is_refused_in_bounded_memory(tmp_path):
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(b'{"text": "fine"}\n{"text": "')
        file.truncate(1 << 30)                                # of zeros that take no room on the disk
    done, peak = measured("import sys, data; sys.exit(data.main(sys.argv[1:]))", "prepare", tmp_path / "a.jsonl",
                          "--workers", "1", "--out", tmp_path / "o")
    assert done.returncode == 2 and f"{tmp_path}/a.jsonl:2: a line of more than 33,554,432 bytes" in done.stderr
    assert done.stderr.count("\n") == 1 and os.listdir(tmp_path) == ["a.jsonl"]
    assert peak < 250_000                                     # kB: the limit of a line, twice, and Python


# ---------------------------------------------------------------------------------------------------------------------
# Command lines and mixtures

def test_any_value_of_any_flag_or_variable_of_training_is_taken_or_named():
    rng, taken, refused = random.Random(7), 0, 0
    for flag in FLAGS:
        texts = [*TEXTS, *(text(rng, 12) for _ in range(30)), repr(rng.uniform(-9, 9)), "5", "0.5"]
        for value in texts if flag.parse not in (None, str) else ():
            for source in (f"--{flag.name}", flag.env):
                if source is None or source == flag.env and not value:
                    continue                                  # an empty variable is one that is not set
                argv, environ = ([f"{source}={value}"], {}) if source != flag.env else ([], {source: value})
                try:
                    got = getattr(parse_args(argv, environ=environ), flag.name)
                    taken += 1
                    assert got == value or isinstance(got, int) or np.isfinite(got), (argv, environ, got)
                except UsageError as fault:
                    refused += 1
                    line = str(fault)
                    assert f"{source}: " in line and line.isprintable(), line
                    assert "literal" not in line and "integer string" not in line, line    # Python's words, not ours
    assert taken > 100 and refused > 2000


@pytest.mark.parametrize("text", ("1_0", "1_0.5", "1e1_0", "\u0661\u0660", "\uff11\uff10", " 10", "10 ", "10\n", "nan",
                                  "inf", "infinity", "0x10", "1e", ".", "", "1" * 5000))
def test_a_number_is_written_in_plain_decimals_wherever_one_is_taken(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    for flag in FLAGS:
        if flag.parse is not None and not hasattr(flag.parse, "choices") and type(flag.default) in (int, float):
            with pytest.raises(UsageError, match=f"^--{flag.name}: "):
                parse_args([f"--{flag.name}={text}"], environ={})
    for name in ("hidden_size", "rope_theta", *["engram_orders"] * bool(text)):    # it may be left empty
        with pytest.raises(UsageError, match=f"^--set: {name} "):
            apply_settings(SpiderConfig.preset("tiny"), f"{name}={text}")
    for name in ("n_loops", "bytes", "temperature", "top_k", "top_p", "samples", "seed"):
        with pytest.raises(UsageError, match=f"--{name}: "):
            sample.parse_args([f"--{name}={text}"])
    with pytest.raises(UsageError, match="--minutes: "):
        bench.parse_args([f"--minutes={text}"])
    for name in ("RANK", "WORLD_SIZE"):
        assert not text or World({name: text}).bad_environ
    (tmp_path / "web").mkdir()
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(errors.DataError, match="neither a directory nor a mixture"):
        open_data(f"web:{text}")
    for flag in ("--val_fraction", "--unit_mb"):
        assert flag in complaint(capsys, "prepare", "a.txt", "--out", "o", f"{flag}={text}")
    for flag in ("--seq_len", "--seed", "--first", "--count"):
        assert flag in complaint(capsys, "show", "web", f"{flag}={text}")


@pytest.mark.parametrize("name, text, value", (("target_tokens", "10e9", 10 ** 10), ("seq_len", "+64.", 64),
                                               ("seed", "4611686018427387903", (1 << 62) - 1), ("lr", "1E-3", 1e-3),
                                               ("lr", ".5", 0.5), ("max_steps", "1e3", 1000)))
def test_a_whole_number_may_be_written_with_an_exponent(name, text, value):
    assert getattr(parse_args([f"--{name}={text}"], environ={}), name) == value


EXTREMES = ["1.7e308", "1e300", "1e39", "1e18", str((1 << 62) - 1), "1e6", "1000", "1", "1e-46", "1e-308", "5e-324",
            "-0.0"]
LONG = {"seq_len", "micro_batch", "grad_accum", "global_batch", "max_steps", "n_loops"}  # they make a run long or large


def is_numeric(flag) -> bool:
    return flag.parse is not None and not hasattr(flag.parse, "choices") and type(flag.default) is not str and (
        flag.default is not None or flag.name.startswith(("target_", "global_")))


@pytest.mark.parametrize("optimizer", ("muon", "adamw"))
@pytest.mark.parametrize("name", [
    flag.name if flag.name in ("lr", "weight_decay") else pytest.param(flag.name, marks=pytest.mark.slow)
    for flag in FLAGS if is_numeric(flag) and flag.name not in LONG])
def test_any_number_that_a_flag_takes_gives_a_run_or_one_line(tmp_path, shards, capsys, name, optimizer):
    taken, parse = [], next(flag.parse for flag in FLAGS if flag.name == name)
    for text in EXTREMES:
        with suppress(ValueError):
            taken.append((parse(text), text))
    for _, text in (min(taken), max(taken)):
        argv = run_flags(shards, tmp_path / text, "--optimizer", optimizer, f"--{name}={text}", steps=3)
        status, said = train.command_line(argv), capsys.readouterr().err.splitlines()
        assert status == 0 or status == 2 and f"train.py: error: --{name}" in said[-1], (text, said[-1])


@pytest.mark.parametrize("name", ("lr", "weight_decay", "engram_lr", "rank_timeout"))
@pytest.mark.parametrize("text", ("1.7e308", "1e300", "1e39"))
def test_a_number_that_overflows_where_it_is_used_is_refused(name, text):
    with pytest.raises(UsageError, match=f"^--{name}: '{text}' is not a number .* and at most 1"):
        parse_args([f"--{name}={text}"], environ={})


def test_a_batch_of_more_micro_steps_than_memory_holds_is_refused(capsys):
    assert train.command_line(["--mock_data", "--dry_run", "--model", "tiny", "--global_batch", "4096e12"]) == 2
    assert "--global_batch: 4,096,000,000,000,000 bytes are 1,000,000,000,000 micro-steps" in capsys.readouterr().err


def command_line(program: str, *argv) -> int:
    """The exit status of one of the project's command lines."""
    main = dict(train=train.command_line, sample=sample.main, data=data.main, curves=curves.main, bench=bench.main)[program]
    return main([*map(str, argv)])


@pytest.mark.parametrize("argv, named", (
    (("train", "--mock_data", "--dry_run", "--ckpt_dir", ""), "--ckpt_dir: '' is not a path"),
    (("train", "--dry_run", "--data_dir", ""), "--data_dir: '' is not a path"),
    (("train", "--mock_data", "--dry_run", "--resume", ""), "--resume: '' is not a path"),
    (("train", "--mock_data", "--dry_run", "--run", ""), "--run: '' is not a name"),
    (("sample", "", "--prompt", "a"), "checkpoint: '' is not a path"),
    (("sample", "--eval", ""), "--eval: '' is not a path"),
    (("sample", "--eval", "a.txt", "--json", ""), "--json: '' is not a path"),
    (("sample", "--show", "a", "--html", ""), "--html: '' is not a path"),
    (("sample", "--export", ""), "--export: '' is not a path"),
    (("data", "prepare", "", "--out", "o"), "INPUT: '' is not a path"),
    (("data", "prepare", "a.txt", "--out", ""), "--out: '' is not a path"),
    (("data", "verify", ""), "DIR: '' is not a path"), (("data", "show", ""), "SPEC: '' is not a path"),
    (("curves", "", "a=a"), "spider.training.curves OUT.png LABEL=DIR"), (("curves", "o.png", "a="), "LABEL=DIR"),
    (("curves", "o.png", "a=.", "a=.."), "each LABEL once"),
    (("bench", "--only", "segments", "--device", "cpu", "--out", ""), "--out: '' is not a path"),
    (("bench", "--only", "segments", "--device", "cpu", "--data_dir", ""), "--data_dir: '' is not a path"),
    (("bench", "--only", "segments", "--device", "cpu", "--seq_len", ""), "--seq_len: '' is not"),
    (("sample", "x", "--convert", ""), "--convert: '' is not a path")), ids=lambda value: " ".join(value)[:60])
def test_a_path_that_is_empty_is_named_by_its_flag_and_nothing_is_written(tmp_path, monkeypatch, capsys, argv, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    assert command_line(*argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith(f"{argv[0]}.py: error: ") and named in err, err
    assert snapshot(tmp_path) == {tmp_path / "a.txt": b"some text"}


@pytest.mark.parametrize("below", ("", "below", "below/it"))
@pytest.mark.parametrize("flags", ((), ("--dry_run",), ("--resume", "none.pt")))
def test_a_file_in_the_place_of_the_checkpoint_directory_is_named_with_its_flag(tmp_path, capsys, below, flags):
    (tmp_path / "file").write_text("mine")
    assert train.command_line(["--mock_data", "--ckpt_dir", str(tmp_path / "file" / below), *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"train.py: error: --ckpt_dir: {tmp_path / 'file'} is a file, not a directory: name another")
    assert snapshot(tmp_path) == {tmp_path / "file": b"mine"}


def test_random_command_lines_of_training_are_taken_or_refused_in_a_line():
    rng, words = random.Random(8), [f"--{flag.name}" for flag in FLAGS] + ["--no", "-x", "--", "5"] + TEXTS
    for _ in range(1000):
        argv = [rng.choice((rng.choice(words), rng.choice(words) + "=" + rng.choice(TEXTS), text(rng, 6)))
                for _ in range(rng.randrange(1, 4))]
        try:
            if not any(word.startswith(("-h", "--h")) for word in argv):
                parse_args(argv, environ={})
        except UsageError as fault:
            assert str(fault).isprintable(), (argv, str(fault))


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
            good = value.isascii() and value.isdigit() and low <= int(value) < 1 << 62 if low is not None else \
                0 <= number(value) < 1 if flag == "--val_fraction" else 0 < number(value) <= 1e6
        except ValueError:
            good = False
        if not good:
            refused += 1
            assert flag in complaint(capsys, *argv, f"{flag}={value}")
    assert snapshot(prepared) == before and refused > 70


@pytest.mark.parametrize("spec", ("web:1,web:1", "web:0.7,code:0.2,web:0.1", "web:1,./web:1", "web:1,link:1"))
def test_a_source_that_is_named_twice_is_refused_under_whatever_names(tmp_path, monkeypatch, capsys, spec):
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        Path(name).mkdir()
        np.zeros(300, "<u2").tofile(f"{name}/x.bin")
    Path("link").symlink_to("web")
    assert f"{spec}: names a directory twice" in complaint(capsys, "show", "--seq_len", "8", spec)
    assert len(open_data("web:1,code:1")) == 2


def test_any_mixture_is_opened_or_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        Path(name).mkdir()
        np.zeros(300, "<u2").tofile(f"{name}/x.bin")
    rng, before, opened = random.Random(11), snapshot(tmp_path), 0
    weights = ["1", "0.7", "3", "1e-300", "1e308", "5e-324", "0", "-1", *TEXTS]
    for case in range(1000):
        parts = [rng.choice(("web", "code") * 2 + ("gone", "", text(rng, 5))) + rng.choice((":",) * 6 + ("", "::"))
                 + rng.choice(weights[:4] if case % 2 else weights) for _ in range(rng.randrange(1, 4))]
        spec = ",".join(parts)
        try:
            sources = open_data(spec)
            assert math.isclose(sum(s.weight for s in sources), 1) and {s.name for s in sources} <= {"web", "code"}
            Loader(sources, 8, 0).rows([0, 1])
            opened += 1
        except errors.DataError as fault:
            line = complaint(capsys, "show", "--seq_len", "8", "--", spec)
            assert one_line(fault) in line
            assert line.startswith(tuple(f"data.py: error: {one_line(name)}: " for name in (
                spec, *(part.rpartition(":")[0] for part in parts)))), (spec, line)
    assert snapshot(tmp_path) == before and 50 < opened < 1000
