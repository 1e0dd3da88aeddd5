"""Damaged shards, links, pipes, shards that change, and metadata of any content: one line that names the file."""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

import data
from bad_data import no_waiting, prepared, quick_disk  # noqa: F401
from bad_data import a_socket, complaint, device, nodes, pipe, snapshot
from fuzzing import JUNK, mutated
from spider import errors
from spider.console import one_line
from spider.data import shards
from spider.data.loader import Loader
from spider.data.shards import Shard, check, find_shards, open_data
from tokenizer import VOCAB_SIZE


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
def test_an_unreadable_file_is_named_and_not_skipped(prepared, name):
    (prepared / "web" / "b.bin").write_bytes(bytes(20))
    (prepared / "a.bin").write_bytes(bytes(20))               # there is something else to train on
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as root:               # pytest's directories are for their user alone
        os.chmod(root, 0o755)
        directory = shutil.copytree(prepared, Path(root, "data"))
        try:
            (directory / name).chmod(0)
            os.seteuid(user or 65534)                         # root may read everything
            with pytest.raises(errors.DataError) as fault:
                open_data(str(directory))
            assert str(fault.value) == f"{directory / name}: Permission denied"
        finally:
            os.seteuid(user)
            (directory / name).chmod(0o755)


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


@pytest.mark.parametrize("make", [pipe, a_socket, device])
@pytest.mark.parametrize("name", ["a.bin", "web/train-00001.bin", "web/metadata.json"])
def test_what_is_no_file_among_the_shards_is_named_and_never_waited_for(prepared, capsys, no_waiting, make, name):
    (prepared / name).unlink(missing_ok=True)
    make(prepared / name)
    for reader in (["verify", prepared], ["show", prepared, "--seq_len", "9"]):
        line = complaint(capsys, *reader)
        assert f"{prepared / name} is a {make.__name__.removeprefix('a_')}, not a file: delete it" in line


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
def test_a_shard_that_changes_during_the_run_stops_it_and_the_same_order_continues_when_it_is_back(tmp_path, change):
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


def streams(spec: Path) -> list:
    [found] = open_data(str(spec))
    return [[(shard.path, shard.ids.tolist()) for shard in stream.shards] for stream in (found.train, found.val)]


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
def test_metadata_that_is_no_file_is_not_skipped(prepared, capsys, make):
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
