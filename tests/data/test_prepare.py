"""data.py prepare: inputs and their documents, bad records, splits, kills; its command line."""

import errno
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
from codecs import BOM_UTF8
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from conftest import contents, measured, run_python
from data import open_data
from preparing import (
    documents,
    error_line,
    joined,
    metadata,
    prepare,
    run_data,
    train_texts,
    write_shard,
)
from spider import errors, files
from spider.data import inputs

pytestmark = pytest.mark.usefixtures("in_tmp_path")
LINE = b'{"text": "fine"}\n'


def write(name: str, content: bytes):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def random_text(n_bytes: int) -> bytes:
    """Return random bytes in hexadecimal digits."""
    return random.Random(0).randbytes(n_bytes).hex().encode()


def json_line(text: str) -> str:
    return json.dumps(dict(text=text)) + "\n"


# --------------------------------------------------------------------------------------------------
# Documents and their split


def test_tinyshakespeare_is_split_at_the_usual_byte():
    write("in.txt", bytes(1_115_394))
    prepare("in.txt --binary --out o")
    [source] = open_data("o")
    assert len(source.train) == 1_003_854 + 2  # with BOS and EOS
    assert len(source.val) == 111_540 + 2


def test_documents_are_split_by_a_stable_hash_and_stay_in_order(monkeypatch):
    """The input format does not matter. A smaller fraction validates a subset of the texts."""
    monkeypatch.setattr(inputs, "MIB", 5)  # so that files are hashed in several pieces
    texts = [f"document {i} \u00fc\u4e2d\U0001f600 " + "y" * (i % 50) for i in range(400)]
    lines = [f"\n{json.dumps(dict(body=text))}\r\n" for text in texts]
    write("a.jsonl", "".join(lines).encode())
    write("b.ndjson", "".join(lines).encode())
    prepare("a.jsonl b.ndjson --field body --val_fraction 0.25 --out o")
    val = [text.decode() for text in documents("o", "val")]
    train = [text.decode() for text in documents("o", "train")]
    assert train == 2 * [text for text in texts if text not in val]
    assert val == 2 * [text for text in texts if text in val]
    assert val[:2] == texts[:2]  # every version chose these
    totals = metadata("o")["totals"]
    assert totals["val"]["documents"] == len(val) == 180
    assert totals["train"]["documents"] == len(train)

    for i, text in enumerate(texts):
        write(f"files/{i}.md", text.encode())
    chosen = []
    for fraction in (0.25, 0.1):
        prepare(f"files --ext .md --val_fraction {fraction} --out of{fraction}")
        chosen.append({text.decode() for text in documents(f"of{fraction}", "val")})
    assert chosen[0] == set(val) > chosen[1] != set()


# Documents for --val_fraction 0.1: count, bytes, lower bound of the hashes, expected split
FEW = {
    "nothing drawn": [(3, 98, 0.2, "val"), (22, 98, 0.5, "train")],
    "too little drawn": [(1, 47, 0, "val"), (2, 98, 0.2, "val"), (17, 98, 0.5, "train")],
    "half of the share drawn": [(1, 98, 0, "val"), (19, 98, 0.5, "train")],
    "one": [(1, 98, 0.5, "both")],
    "one, drawn": [(1, 98, 0, "both")],
    # five copies of 99; 4, a tenth of the copies (49.5) and 8 reach a tenth of all 557 bytes
    "one of half": [
        (1, 4, 0.2, "val"),
        (1, 99, 0.3, "both"),
        (1, 8, 0.5, "val"),
        (1, 50, 0.7, "train"),
    ],
}


def texts_of_hash(count: int, size: int, low: float) -> list[bytes]:
    """Make texts with hashes (as fractions of 2**64) between `low` and `low + 0.1`."""
    found = []
    for number in itertools.count():
        text = f"{number:0{size}}".encode()
        digest = hashlib.blake2b(text, digest_size=8, person=b"validation").digest()
        if low <= int.from_bytes(digest, "little") / 2**64 < low + 0.1:
            found.append(text)
        if len(found) == count:
            return found


@pytest.mark.parametrize("groups", FEW.values(), ids=FEW)
def test_few_documents_validate_by_lowest_hash_up_to_a_tenth(groups):
    """If five copies of a text are half of all bytes, the last tenth of each copy validates."""
    expected = dict(train=[], val=[])
    lines = []
    for *group, split in reversed(groups):
        copies = 5 if split == "both" else 1
        for text in copies * texts_of_hash(*group):
            lines.append(json_line(text.decode()))
            cut = dict(train=len(text), val=0, both=len(text) * 9 // 10)[split]
            expected["train"] += filter(None, [text[:cut]])
            expected["val"] += filter(None, [text[cut:]])
    write("in.jsonl", "".join(lines).encode())
    prepare("in.jsonl --out o")
    assert {split: documents("o", split) for split in expected} == expected


def test_few_documents_are_each_cut_if_one_exceeds_val_fraction():
    texts = [text.decode() for text in texts_of_hash(3, 200, 0.3)]
    write("in.jsonl", "".join(map(json_line, texts)).encode())
    prepare("in.jsonl --val_fraction 0.01 --out o")
    assert documents("o", "val") == [text[-2:].encode() for text in texts]


def test_many_documents_keep_the_split_of_their_hashes(monkeypatch):
    monkeypatch.setattr("spider.data.prepare.MAX_BUFFERED", 3)
    write("in.jsonl", b"".join(b'"%s"\n' % text for text in texts_of_hash(4, 9, 0.5)))
    prepare("in.jsonl --out o")
    assert len(documents("o", "train")) == 4


@pytest.fixture
def mixed() -> str:
    """Write a directory with a text file, JSON lines of short and long texts, and files of other
    types; return the directory's name."""
    write("in/a.txt", random_text(2500))
    texts = ["na\u00efve \u4f60\u597d \U0001f577", *("x" * n for n in range(0, 3000, 40))]
    write("in/sub/b.jsonl", "\n\n".join(map(json_line, texts)).encode())
    for name in ("c.log", "Makefile", ".hidden.txt"):
        write(f"in/{name}", b"not data")
    return "in"


def test_shard_size_does_not_change_the_stream(mixed, monkeypatch, capsys):
    prepare("in --out one")
    line = "prepare: skipped by extension: 1 without extension, 1 .log; --ext sets which to read"
    assert line in capsys.readouterr().err
    monkeypatch.setattr(inputs, "MIB", 50)  # inputs are read in multiples of MIB
    prepare("in --out many --shard_mb 0.002")
    assert run_data("verify many") == 0
    one = metadata("one")
    many = metadata("many")
    assert one["totals"] == many["totals"]
    assert len(one["shards"]) == 2
    assert len(many["shards"]) > 90
    sizes = [entry["ids"] for entry in many["shards"]]
    assert sum(size != 1000 for size in sizes) <= 2  # the last one of each split
    for split in ("train", "val"):
        assert joined("one", split) == joined("many", split) != b""


def test_ext_makes_each_file_one_document_in_sorted_order():
    files = {}
    for i in range(100):
        name = f"{'sub/' * (i % 3)}{i * 7 % 100}.{('py', 'txt', 'RST')[i % 3]}"
        files[Path(name)] = f"# \u00fc{i}\n".encode()
        write(f"in/{name}", files[Path(name)])
    write("in/sub/__init__.py", b"")
    write("in/x.jsonl", b"no JSON")
    assert train_texts("in --ext .py,txt,.rst") == [files[path] for path in sorted(files)]
    assert metadata("o")["skipped"] == {"empty": 1}


def test_source_directory_skips_libraries_and_run_files(capsys):
    files = {
        "in/a.py": b"import b",
        "in/data.csv": b"1,2\n3,4",
        "in/docs/a.MD": b"# A",
        "in/lib/site-packages/c.py": b"not ours",
        "in/metrics.jsonl": b'"not a text"',
        "in/node_modules/c/index.js": b"not ours",
        "in/package.json": b'{"name": "in"}',
        "in/requirements.txt": b"torch",
        "in/run/metadata.json": b'"not a text"',
        "in/x.cpp": b"int x;",
    }
    for name, content in files.items():
        write(name, content)
    texts = [b"import b", b"# A", b"torch", b"int x;"]
    assert train_texts("in") == texts
    err = capsys.readouterr().err
    assert "skipped 2 without a text in 'text' (first: in/data.csv:1: it has 1, 2: " in err
    write("Makefile", b"all:")
    assert train_texts("Makefile in/metrics.jsonl", out="named") == [b"all:", b"not a text"]


def test_pydoc_reads_pythons_documentation_without_repeated_paragraphs():
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = ("\n\n".join(dict.fromkeys(paragraphs)) + "\n").encode()
    cut = int(len(text) * 0.9)
    prepare("pydoc --out o")
    assert [*documents("o", "train"), *documents("o", "val")] == [text[:cut], text[cut:]]
    write("pydoc", b"a file of this name")
    assert train_texts("pydoc", out="file") == [b"a file of this name"]


@pytest.mark.parametrize(
    "raw, layout, texts",
    [
        (b"0123456789", "text", [b"01234", b"56789"]),
        (b'[\n {"text": "0"}, {"text": "1"}]', "JSON", [b"0", b"1"]),
        (b'\n{ "text": "0"}\n{"text": "1"}\n', "JSON lines", [b"0", b"1"]),
    ],
)
def test_format_of_stdin_is_guessed(monkeypatch, capsys, raw, layout, texts):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    prepare("- --out o --val_fraction 0.5")
    assert documents("o", "train") + documents("o", "val") == texts
    assert f"-: read as {layout}" in capsys.readouterr().err
    assert [name for name in os.listdir("o") if name.endswith(".tmp")] == []


def test_spelled_special_tokens_become_plain_bytes():
    """Only a byte order mark at the start of a file or line is dropped."""
    spelled = "\0\1\2\3\u0100\u0101\u010f<PAD><BOS>"
    line = BOM_UTF8 + json_line(spelled).encode()
    write("a.txt", BOM_UTF8 + spelled.encode() + b"\xff\xfe")
    write("b.jsonl", line + line)
    texts = [spelled.encode() + b"\xff\xfe", spelled.encode(), spelled.encode()]
    assert train_texts("a.txt b.jsonl --binary --strict") == texts


# --------------------------------------------------------------------------------------------------
# JSON

BAD_LINES = {
    b"null": "without a text in 'text': it is None",
    b'{"body": "x", "id": 5}': "without a text in 'text': it has body, id: make one text of",
    b'{"text": [{"role": "a"}]}': "without a text in 'text': it is [{'role': 'a'}]; chat data: ",
    b'{"text": "fi': "not JSON",
    b"[" * 100_000: "not JSON",
    b'{"text": "\xff"}': "not JSON in UTF-8",
    b'{"text": "ab\\ud800"}': "with a lone surrogate",
    b'{"text": "' + b"x" * 150_000 + b'"}': "longer than",
}


@pytest.mark.parametrize(
    "bad, message", BAD_LINES.items(), ids=[str(line[:16]) for line in BAD_LINES]
)
def test_bad_lines_are_skipped_and_counted_by_error(monkeypatch, capsys, bad, message):
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 120_000)
    monkeypatch.setattr(inputs, "MIB", 1000)
    write("a.jsonl", LINE + b"\n" + bad + b"\n" + LINE + bad + b"\n" + LINE)
    assert train_texts("a.jsonl") == 3 * [b"fine"]
    summary, *detail = message.split(": ", 1)
    assert f"prepare: skipped 2 {summary}" in (err := capsys.readouterr().err)
    assert ": ".join(["(first: a.jsonl:3", *detail]) in err
    assert list(metadata("o")["skipped"].values()) == [2]
    assert f"a.jsonl:3: {message}" in error_line(capsys, "prepare a.jsonl --strict --out strict")
    assert os.listdir("strict") == []


JSON_LAYOUTS = {
    "array": b' [{"text": "one"},\n\n{"id": 1, "text": "two"}]\n',
    "with a byte order mark": BOM_UTF8 + b'[{"text": "one"}, {"text": "two"}]',
    "objects over several lines": b'{\n"text": "one"\n}\n{\n"text":\n"two"}\n',
    "lines, the first one a list": b'["three"]\n{"text": "one"}\n{"text": "two"}',
    "an array of one line after another": b'[{"text": "one"},\n{"text": "two"}\n]',
    "bad elements": b'[{"text": "one"}, null, 5, {"text": null}, {"text": "\xff"}, {"text": '
    b'"\\ud800"}, "two"]',
}


@pytest.mark.parametrize("raw", JSON_LAYOUTS.values(), ids=JSON_LAYOUTS)
def test_json_layout_is_detected(raw):
    write("in.json", raw)
    assert train_texts("in.json") == [b"one", b"two"]
    assert train_texts("in.json --ext .json", out="document") == [raw.removeprefix(BOM_UTF8)]


BAD_ENDS = [b"", b', {"text": "three', b"[" * 100_000]


@pytest.mark.parametrize("end", BAD_ENDS, ids=[str(end[:12]) for end in BAD_ENDS])
def test_json_array_is_read_up_to_a_syntax_error(capsys, end):
    write("a.json", b'[{"text": "one"}, {"text": "two"}' + end)
    assert train_texts("a.json") == [b"one", b"two"]
    message = "not JSON; the rest of the file is not read"
    assert f"skipped 1 {message} (a.json:3)" in capsys.readouterr().err
    line = error_line(capsys, "prepare a.json --strict --out strict")
    assert f"a.json:3: {message}" in line


# --------------------------------------------------------------------------------------------------
# Bad files

ENGLISH = b"It is a truth universally acknowledged, that a single man in possession\n" * 20
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
FRENCH = "\u00c7a, o\u00f9 \u00e7a\u00a0? L\u00e0, pr\u00e8s de la for\u00eat.\n" * 20
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0"
# Content that is not text, and its error message
NO_TEXT = {
    "UTF-32": (FRENCH.encode("utf-32"), "1 UTF-32: convert it with `iconv"),
    "UTF-16": (FRENCH.encode("utf-16"), "1 UTF-16: convert it with `iconv"),
    "UTF-16 without a mark": (FRENCH.encode("utf-16-le"), "1 binary, or UTF-16"),
    "Latin-1": (FRENCH.encode("latin-1"), "1 Latin-1 or another encoding that is not UTF-8: conv"),
    "PNG": (PNG, "1 binary"),
    "4% that is not UTF-8": (b"\xff" * 4 + b"x" * 96, "1 Latin-1 or another encoding"),
}


@pytest.mark.parametrize("content, message", NO_TEXT.values(), ids=NO_TEXT)
def test_non_text_files_are_skipped_unless_binary(monkeypatch, capsys, content, message):
    write("in/a.txt", content)
    write("in/b.log", content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    for command in ("in/a.txt", "in/b.log", "in/b.log --ext .log", "-"):
        line = error_line(capsys, f"prepare {command} --out none")
        assert f"nothing to train on: {message}" in line
    write("in/c.txt", ENGLISH)
    assert "error: in/a.txt: " in error_line(capsys, "prepare in --strict --out none")
    assert train_texts("in") == [ENGLISH]
    assert f"prepare: skipped {message}" in capsys.readouterr().err
    assert train_texts("in --binary", out="all") == [content, ENGLISH]


@pytest.mark.parametrize("name", ("a.txt", "a.jsonl.gz", "a.parquet"))
@pytest.mark.parametrize("flags", ("", "--binary"))
def test_git_lfs_pointer_is_reported_for_any_format(capsys, name, flags):
    write(name, POINTER)
    line = error_line(capsys, f"prepare {name} --out o {flags}")
    assert "nothing to train on: 1 Git LFS pointer instead of the file: run `git lfs" in line


def test_twenty_skipped_files_are_printed_and_all_are_recorded(capsys):
    names = [f"in/{number}.txt" for number in range(10, 35)]
    for name in names:
        write(name, b"")
    write("in/9.txt", b"a text")
    prepare("in --out o")
    assert f"skipped 25 empty (first: {', '.join(names[:20])})" in capsys.readouterr().err
    assert metadata("o")["skipped_at"] == dict(empty=names)


TEXTS = {
    "3% that is not UTF-8": b"\xff" * 3 + b"x" * 97,
    "a character over the end of 8 KiB": b"x" * 8191 + FRENCH.encode(),
    "NULs after 8 KiB": ENGLISH * 6 + b"\0" * 9,
    "control characters between fields": b"8=FIX.4.2\0019=65\00135=A\001\x02bold\x02 \x034,1red\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_with_few_odd_bytes_is_read_unchanged(text):
    write("a.txt", text)
    assert train_texts("a.txt --strict") == [text]


@pytest.fixture
def unreadable(monkeypatch):
    """Make a directory `in` with a good file, four bad ones and an unreadable directory."""
    write("in/good.txt", b"text")
    Path("in/denied").mkdir()
    write("in/denied.json", b"[]")
    Path("in/dead.txt").symlink_to("nowhere")
    Path("in/loop.jsonl").symlink_to("loop.jsonl")
    os.mkfifo("in/pipe.csv")
    scandir = os.scandir

    def scan(path):
        if path == "in/denied":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    # These stand in for permissions, because root may read everything.
    monkeypatch.setattr(os, "access", lambda path, mode: "denied" not in str(path))
    monkeypatch.setattr(os, "scandir", scan)


def test_unreadable_files_are_skipped_unless_strict_or_named(unreadable, capsys):
    assert train_texts("in") == [b"text"]
    assert metadata("o")["skipped"] == {
        "unreadable: Permission denied": 1,
        "unreadable, a dead link or not a regular file": 4,
    }
    err = capsys.readouterr().err
    assert (
        "(in/denied)\nprepare: skipped 4 unreadable, a dead link or not a regular file (in/d" in err
    )
    assert "no validation split" in err
    line = error_line(capsys, "prepare in --strict --out none")
    assert "error: in/denied: unreadable: Permission denied" in line
    for name in "denied dead.txt loop.jsonl".split():
        line = error_line(capsys, f"prepare in/{name} in/good.txt --out none")
        assert f"error: in/{name}: " in line


def test_named_pipe_is_read():
    os.mkfifo("a.jsonl")
    with ThreadPoolExecutor() as thread:
        thread.submit(Path("a.jsonl").write_bytes, b'"0123456789"')
        prepare("a.jsonl --val_fraction 0.5 --out o")
    assert documents("o", "train") == [b"01234"]
    assert documents("o", "val") == [b"56789"]


# --------------------------------------------------------------------------------------------------
# The output directory

KILL_IN_CALL = """
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


@pytest.mark.parametrize(
    "call, count, message",
    [
        ("replace", 0, "contains no .bin file"),
        ("replace", 3, "train-00002.bin: missing"),
    ],
)
def test_killed_prepare_leaves_no_usable_data_and_can_be_repeated(mixed, call, count, message):
    arguments = f"{mixed} --shard_mb 0.02 --out"
    prepare(f"{arguments} undisturbed")
    killed = run_python(KILL_IN_CALL, call, count, "prepare", *arguments.split(), "o", cwd=".")
    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir("o")) > 1
    with pytest.raises(errors.DataError, match=message):
        open_data("o")
    write_shard("o/.prepare/train-00077.bin", range(99))  # left by a process with other inputs
    if "missing" in message:  # some shards already have their final names
        assert run_data(f"prepare {arguments} o") == 2
        shutil.rmtree("o")
    prepare(f"{arguments} o")
    assert contents(Path("o")) == contents(Path("undisturbed"))


FULL = OSError(errno.ENOSPC, "No space left on device", "o/train-00001.bin")


@pytest.mark.parametrize(
    "fault, status, line",
    (
        (FULL, 2, "error: o/train-00001.bin: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ),
    ids=("full disk", "Ctrl-C"),
)
def test_failed_prepare_leaves_no_files(mixed, monkeypatch, capsys, fault, status, line):
    replace = os.replace

    def fail_at_second(path, target):
        if target.name == "train-00001.bin":
            raise fault
        return replace(path, target)

    monkeypatch.setattr(os, "replace", fail_at_second)
    write("o/train-00000.bin.bak", b"someone else's")
    assert run_data("prepare in --shard_mb 0.02 --out o") == status
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"data.py: {line}")
    assert os.listdir("o") == ["train-00000.bin.bak"]


def test_output_directory_may_be_a_symlink_and_is_locked(capsys):
    write("a.txt", b"a text")
    Path("far").mkdir()
    Path("o").symlink_to("far")
    with files.locked(Path("o")):
        assert "another command is using it" in error_line(capsys, "prepare a.txt --out o")
    prepare("a.txt --shard_mb 1e-6 --out o")  # one id per shard
    assert documents("far", "train") == [b"a tex"]


def test_prepare_uses_little_memory_and_no_torch(tmp_path):
    """The inputs, a long text and a line of JSON above the limit, are sparse files of zeros."""
    with open("a.txt", "wb") as file:
        file.truncate(100_000_000)
    with open("b.jsonl", "wb") as file:
        file.write(LINE + b'{"text": "')
        file.truncate(200_000_000)
    code = """if True:
        import sys
        import data
        status = data.main(sys.argv[1:])
        assert "torch" not in sys.modules
        sys.exit(status)"""
    done, peak = measured(code, "prepare", tmp_path, "--binary", "--out", tmp_path / "o")
    assert done.returncode == 0
    assert f"1 longer than 33,554,432 bytes ({tmp_path}/b.jsonl:2)" in done.stderr
    assert peak < 160_000  # kB: twice the longest line, and Python
