"""data.py prepare: inputs and their documents, bad records, splits, kills; its command line."""

import errno
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import data
from bad_data import complaint, documents, joined, write_shard
from conftest import ROOT, contents, measured, prepare
from data import open_data
from spider import common, inputs
from spider.prepare import ShardWriter
from tokenizer import VOCAB_SIZE

LINE = b'{"text": "fine"}\n'


def metadata(directory: Path) -> dict:
    return json.loads((directory / "metadata.json").read_text())


def test_a_text_is_split_by_bytes_as_everyone_splits_tinyshakespeare(tmp_path):
    text = random.Random(0).randbytes(1_115_394)
    (tmp_path / "in.txt").write_bytes(text)
    assert prepare(tmp_path / "in.txt", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "o", "train") == [text[:1_003_854]]
    assert documents(tmp_path / "o", "val") == [text[1_003_854:]]
    [found] = open_data(str(tmp_path / "o"))
    assert len(found.train) == 1_003_856 and len(found.val) == 111_542


def test_json_lines_become_documents_of_which_a_hash_of_the_text_chooses_some_to_validate(tmp_path):
    texts = [f"document {i} \u00fc\u4e2d\U0001f600 " + "y" * (i % 50) for i in range(400)]
    for name in ("a.jsonl", "b.ndjson"):
        (tmp_path / name).write_text(
            "".join(f"\n{json.dumps(dict(body=text))}\r\n" for text in texts)
        )
    chosen = []
    for names in (["a.jsonl"], ["b.ndjson"], ["a.jsonl", "b.ndjson"]):
        out = tmp_path / "".join(names).replace(".", "")
        argv = [tmp_path / name for name in names] + [
            "--field",
            "body",
            "--val_fraction",
            "0.25",
            "--out",
            out,
        ]
        assert prepare(*argv) == 0
        train, val = (
            [document.decode() for document in documents(out, split)] for split in ("train", "val")
        )
        assert (
            sorted(train + val) == sorted(texts * len(names)) and 60 < len(val) / len(names) < 140
        )
        totals = metadata(out)["totals"]
        assert (totals["train"]["documents"], totals["val"]["documents"]) == (len(train), len(val))
        chosen.append(val)
    # in their order
    assert chosen[0] == chosen[1] == [text for text in texts if text in set(chosen[0])]
    assert chosen[2] == chosen[0] + chosen[1]
    assert chosen[0][:2] == texts[:2]  # the hash is that of every version


def validation_texts(out: Path, *argv) -> set[bytes]:
    """Prepare inputs; return the texts that validate, of which none may be trained on."""
    assert prepare(*argv, "--out", out) == 0
    train, val = (set(documents(out, split)) for split in ("train", "val"))
    assert not train & val
    return val


def test_a_text_falls_into_the_same_split_from_any_input_at_any_place(tmp_path, monkeypatch):
    """Each twice in JSON lines, in reverse, and in files of --ext, whose hash is computed in
    several pieces."""
    monkeypatch.setattr(inputs, "MIB", 50)
    texts = [f"text {i} " + "y" * (40 * i % 999) for i in range(60)]
    lines = [json.dumps(dict(text=text)) + "\n" for text in ["", *texts]]
    (tmp_path / "twice.jsonl").write_text("".join(lines + lines))
    (tmp_path / "reverse.jsonl").write_text("".join(reversed(lines)))
    (tmp_path / "files").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "files" / f"{i * 7 % 60}.md").write_bytes(
            inputs.BYTE_ORDER_MARK * (i % 2) + text.encode()
        )
    chosen = {}
    for fraction in ("0", "0.2", "0.5"):
        argv = "--val_fraction", fraction
        twice = validation_texts(tmp_path / f"twice{fraction}", tmp_path / "twice.jsonl", *argv)
        assert (
            validation_texts(tmp_path / f"reverse{fraction}", tmp_path / "reverse.jsonl", *argv)
            == twice
        )
        files = validation_texts(
            tmp_path / f"files{fraction}", tmp_path / "files", "--ext", ".md", *argv
        )
        assert files == twice - {b""}
        chosen[fraction] = twice
    assert chosen["0"] == set() and chosen["0.2"] < chosen["0.5"] and 5 < len(chosen["0.2"]) < 20


@pytest.fixture
def mixed(tmp_path) -> Path:
    """A directory with a text, JSON lines with unicode, blank lines and long lines, and files of
    other kinds."""
    inputs = tmp_path / "in"
    (inputs / "sub").mkdir(parents=True)
    (inputs / "a.txt").write_bytes(random.Random(0).randbytes(5000))
    texts = ["plain", "", "na\u00efve \u4f60\u597d \U0001f577", 'quote " and \\ and\nnewline']
    texts += ["x" * n for n in range(0, 3000, 40)]
    lines = [
        json.dumps(dict(id=i, text=text), ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)
    ]
    (inputs / "sub" / "b.jsonl").write_text("\n\n" + "\n  \n".join(lines), encoding="utf-8")
    for name in ("c.md", "d.md", "Makefile", ".hidden.txt"):
        (inputs / name).write_text("not data")
    return inputs


def test_the_size_of_shards_does_not_change_the_stream(mixed, tmp_path, monkeypatch, capsys):
    assert prepare(mixed, "--out", tmp_path / "one") == 0
    assert f"prepare: {mixed}: skipped 3 other files; --ext" in capsys.readouterr().err
    monkeypatch.setattr(inputs, "MIB", 50)  # of which what is read at a time is a multiple
    assert prepare(mixed, "--out", tmp_path / "many", "--shard_mb", "0.002") == 0
    assert data.main(["verify", str(tmp_path / "many")]) == 0
    one, many = (metadata(tmp_path / out) for out in ("one", "many"))
    assert one["totals"] == many["totals"] and len(one["shards"]) == 2 and len(many["shards"]) > 90
    sizes = [path.stat().st_size for path in (tmp_path / "many").glob("*.bin")]
    assert max(sizes) == 2000 and sum(size < 2000 for size in sizes) <= 2
    for split in ("train", "val"):
        assert joined(tmp_path / "one", split) == joined(tmp_path / "many", split) != b""
        names = [entry["name"] for entry in many["shards"] if entry["split"] == split]
        assert names == sorted(names)


def test_with_ext_every_file_is_a_document_of_which_a_hash_chooses_some_to_validate(tmp_path):
    rng, folder = random.Random(1), tmp_path / "in"
    files = {
        f"{'sub/' * (i % 3)}{rng.choice('abcdef')}{i}.{('py', 'md', 'RST')[i % 3]}": f"# "
        f"\u00fc{i}\n".encode()
        + rng.randbytes(rng.randrange(300))
        for i in range(100)
    }
    for name, content in (files | {"sub/__init__.py": b"", "x.jsonl": b"no JSON"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert prepare(folder, "--ext", ".py,md,.rst", "--out", tmp_path / "o") == 0
    train, val = (documents(tmp_path / "o", split) for split in ("train", "val"))
    assert (
        len(train) + len(val) == 100
        and 3 < len(val) < 25
        and metadata(tmp_path / "o")["skipped"] == {"empty": 1}
    )
    in_order = [files[str(path)] for path in sorted(map(Path, files))]
    assert train == [file for file in in_order if file in set(train)] and set(train) | set(
        val
    ) == set(in_order)
    (tmp_path / "a.txt").write_bytes(b"0123456789")  # a text is cut, a document is not
    for options, train, val in (
        ([], [b"01234"], [b"56789"]),
        (["--ext", ".txt"], [b"0123456789"], []),
    ):
        out = tmp_path / f"o{len(options)}"
        assert (
            prepare(
                tmp_path / "in" / "x.jsonl",
                "--ext",
                "jsonl",
                "--out",
                tmp_path / f"x{len(options)}",
            )
            == 0
        )
        assert (
            prepare(
                tmp_path / "a.txt",
                "--val_fraction",
                "0.5" if val else "0.1",
                *options,
                "--out",
                out,
            )
            == 0
        )
        assert documents(out, "train") == train and documents(out, "val") == val


@pytest.mark.parametrize(
    "raw, kind, train, val",
    [
        (b"0123456789" * 3, "text", [b"012345678901234"], [b"567890123456789"]),
        (b'[\n {"text": "one"}, {"text": "two"}]', "a JSON array", [b"one", b"two"], []),
        (b'\n{ "text": "one"}\n{"text": "two"}\n', "JSON lines", [b"one", b"two"], []),
    ],
)
def test_standard_input_is_prepared_like_a_file_of_the_kind_that_it_begins_like(
    tmp_path, monkeypatch, capsys, raw, kind, train, val
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert prepare("-", "--out", tmp_path / "o", "--val_fraction", "0.5" if val else "0") == 0
    assert documents(tmp_path / "o", "train") == train and documents(tmp_path / "o", "val") == val
    assert f"-: read as {kind}" in capsys.readouterr().err
    assert set(contents(tmp_path / "o")) == {
        "metadata.json",
        "train-00000.bin",
        *["val-00000.bin"] * bool(val),
    }


def test_text_that_spells_sentinels_holds_bytes_alone_and_loses_only_its_byte_order_mark(tmp_path):
    """Control bytes 0-3, and the characters and names whose numbers or words are those of PAD, BOS
    and EOS."""
    spelled = (
        "".join(map(chr, (0, 1, 2, 3, *range(256, VOCAB_SIZE))))
        + "<PAD><BOS><EOS>\\u0101"
        + "\x03\x00"
    )
    (tmp_path / "a.txt").write_bytes(inputs.BYTE_ORDER_MARK + spelled.encode() + b"\xff\xfe")
    (tmp_path / "b.jsonl").write_bytes(
        2 * (inputs.BYTE_ORDER_MARK + json.dumps(dict(text=spelled)).encode() + b"\n")
    )
    for name, raw in (
        ("a.txt", [spelled.encode() + b"\xff\xfe"]),
        ("b.jsonl", 2 * [spelled.encode()]),
    ):
        assert prepare(tmp_path / name, "--val_fraction", "0", "--out", tmp_path / name[0]) == 0
        assert (
            documents(tmp_path / name[0], "train") == raw
            and metadata(tmp_path / name[0])["skipped"] == {}
        )


BAD_LINES = {
    b"null": "without a text in 'text'",
    b'["text"]': "without a text",
    b'{"text": null}': "without a text",
    b'{"body": "x"}': "without a text",
    b'{"text": 5}': "without a text",
    b'{"text": "fi': "not JSON",
    b"[" * 100_000: "not JSON",
    b'{"text": "\xff"}': "not JSON in UTF-8",
    b'{"text": "ab\\ud800"}': "with a lone surrogate",
    b"5": "without a text",
    b'{"text": "' + b"x" * 150_000 + b'"}': "longer than",
}


@pytest.mark.parametrize("bad, kind", BAD_LINES.items(), ids=[str(line[:16]) for line in BAD_LINES])
def test_a_bad_record_is_skipped_counted_and_named_by_kind_and_first_place(
    tmp_path, monkeypatch, capsys, bad, kind
):
    monkeypatch.setattr(inputs, "LINE_LIMIT", 120_000)
    monkeypatch.setattr(inputs, "MIB", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"\n" + bad + b"\n" + LINE + bad + b"\n" + LINE)
    assert prepare(path, "--val_fraction", "0", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "o", "train") == 3 * [b"fine"]
    assert (
        f"prepare: skipped 2 {kind}" in (err := capsys.readouterr().err)
        and f"(first: {path}:3)" in err
    )
    [(named, count)] = metadata(tmp_path / "o")["skipped"].items()
    assert count == 2 and named.startswith(kind)
    line = complaint(capsys, "prepare", path, "--strict", "--out", tmp_path / "strict")
    assert f"{path}:3: {kind}" in line and os.listdir(tmp_path / "strict") == []


def test_utf_16_is_refused_with_the_remedy_and_never_read_as_bytes(tmp_path, capsys):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes("some text".encode("utf-16"))
        line = complaint(capsys, "prepare", tmp_path / name, "--out", tmp_path / "o")
        assert (
            f"UTF-16: convert it by `iconv -f UTF-16 -t UTF-8` (first: {tmp_path / name})" in line
        )


def test_an_empty_split_is_a_refusal_or_a_warning_with_the_remedy(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINE)
    (tmp_path / "a.txt").write_bytes(b"a text")
    for name, fraction in (("a.jsonl", "0"), ("a.jsonl", "0.1"), ("a.txt", "0")):
        assert (
            prepare(
                tmp_path / name, "--val_fraction", fraction, "--out", tmp_path / (name + fraction)
            )
            == 0
        )
        assert (
            "no validation split" in (err := capsys.readouterr().err)
            and "raise --val_fraction" in err
        )
    line = complaint(
        capsys, "prepare", tmp_path / "a.jsonl", "--val_fraction", "0.999", "--out", tmp_path / "o"
    )
    assert "nothing to train on" in line and "lower --val_fraction" in line


JSON = {
    "array": b' [{"text": "one"},\n\n{"id": 1, "text": "two"}]\n',
    "array of texts": b'["one", "two"]',
    "with a byte order mark": inputs.BYTE_ORDER_MARK + b'[{"text": "one"}, {"text": "two"}]',
    "objects over several lines": b'{\n"text": "one"\n}\n{\n"text":\n"two"}\n',
    "lines": b'\n{"text": "one"}\n{"text": "two"}',
    "lines with a bad one": b'{"text": "one"}\n{"text": \n{"text": "two"}',
    "lines, the first one bad": b'xx\n{"text": "one"}\n{"text": "two"}',
    "lines, the first one cut": b'{"text": "o\n{"text": "one"}\n{"text": "two"}',
    "lines, the first one a list": b'["a"]\n{"text": "one"}\n{"text": "two"}',
    "an array of one line after another": b'[{"text": "one"},\n{"text": "two"}\n]',
    "bad elements": b'[{"text": "one"}, null, 5, {"text": null}, {"text": "\xff"}, {"text": '
    b'"\\ud800"}, "two"]',
}


@pytest.mark.parametrize("raw", JSON.values(), ids=JSON)
def test_a_json_file_is_read_as_what_it_holds(tmp_path, monkeypatch, raw):
    (tmp_path / "in.json").write_bytes(raw)
    argv = tmp_path / "in.json", "--val_fraction", "0", "--out"
    for size in (1 << 20, 3):  # bytes at a time
        monkeypatch.setattr(inputs, "MIB", size)
        assert prepare(*argv, tmp_path / f"o{size}") == 0
        assert documents(tmp_path / f"o{size}", "train") == [b"one", b"two"]
    assert prepare(*argv, tmp_path / "documents", "--ext", ".json") == 0
    assert documents(tmp_path / "documents", "train") == [raw.removeprefix(inputs.BYTE_ORDER_MARK)]


def test_texts_of_a_json_array_are_not_changed(tmp_path):
    """Dates, numbers, and texts beside numbers and objects in the same field."""
    texts = ["2020-01-01", "0017", "12.0", "null", "NA", "", "x", '"', "\n\u4e2d"]
    (tmp_path / "in.json").write_text(
        json.dumps([dict(text=text) for text in texts] + [dict(text=5), dict(text={})])
    )
    assert prepare(tmp_path / "in.json", "--val_fraction", "0", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "o", "train") == [text.encode() for text in texts]
    assert metadata(tmp_path / "o")["skipped"] == {"without a text in 'text' (--field)": 2}


@pytest.mark.parametrize(
    "end",
    [
        b"",
        b"]]",
        b", ] x",
        b'{"text": ',
        b"{'text': 1}]",
        b'{"text": "' + b"x" * 3000,
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_json_array_with_a_bad_end_is_read_up_to_there_and_the_rest_counted(
    tmp_path, monkeypatch, capsys, end
):
    monkeypatch.setattr(inputs, "LINE_LIMIT", 2000)
    monkeypatch.setattr(inputs, "MIB", 1000)
    (tmp_path / "a.json").write_bytes(b'[{"text": "one"}, {"text": "two"}' + end)
    assert prepare(tmp_path / "a.json", "--val_fraction", "0", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "o", "train") == [b"one", b"two"]
    assert (
        "skipped 1 not JSON, or longer than 2,000 bytes" in (err := capsys.readouterr().err)
        and "a.json:3)" in err
    )
    assert "a.json:3: not JSON" in complaint(
        capsys, "prepare", tmp_path / "a.json", "--strict", "--out", tmp_path / "strict"
    )


BAD_FILES = {  # in the order in which they are met; a word of why
    "denied": "Permission denied",
    "dead.txt": "dead link",
    "dead.txt.gz": "dead link",
    "denied.json": "Permission denied",
    "loop.jsonl": "dead link",
    "pipe.csv": "no regular file",
}


def test_what_cannot_be_read_in_a_directory_is_skipped_counted_and_named(
    tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "in"
    (folder / "denied").mkdir(parents=True)
    (folder / "denied.json").write_text("[]")
    (folder / "dead.txt").symlink_to(folder / "nowhere")
    (folder / "dead.txt.gz").symlink_to(folder / "gone")
    (folder / "good.txt").write_text("text")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    os.mkfifo(folder / "pipe.csv")

    def denying(real):
        def call(path, *args):
            if Path(path).stem == "denied":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *args)

        return call

    # root may read everything
    monkeypatch.setattr(inputs, "open", denying(open), raising=False)
    monkeypatch.setattr(os, "scandir", denying(os.scandir))
    assert prepare(folder, "--val_fraction", "0", "--out", tmp_path / "all") == 0
    assert documents(tmp_path / "all", "train") == [b"text"]
    assert sum(metadata(tmp_path / "all")["skipped"].values()) == len(BAD_FILES)
    assert f"(first: {folder}/dead.txt)" in capsys.readouterr().err
    for name, reason in BAD_FILES.items():
        path = folder / name
        line = complaint(capsys, "prepare", folder, "--strict", "--out", tmp_path / "strict")
        assert f"error: {path}: " in line and reason in line
        if name != "pipe.csv":  # named, a pipe is read
            line = complaint(
                capsys, "prepare", path, folder / "good.txt", "--out", tmp_path / "named"
            )
            assert f"error: {path}: " in line and ("Permission" in reason) == ("Permission" in line)
        if name == "denied":
            assert f"nothing to train on: 1 unreadable: {reason} (first: {path})" in complaint(
                capsys, "prepare", folder, "--ext", ".md", "--out", tmp_path / "none"
            )
        path.rmdir() if name == "denied" else path.unlink()
    assert prepare(folder, "--strict", "--out", tmp_path / "strict") == 0


def test_a_dead_link_that_is_named_like_a_data_set_is_not_looked_up_at_the_hub(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("owner").mkdir()
    Path("owner", "set").symlink_to("nowhere")
    assert "owner/set: no such file or directory" in complaint(
        capsys, "prepare", "owner/set", "--out", "o"
    )


def test_a_pipe_that_is_named_is_read(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with ThreadPoolExecutor() as thread:
        thread.submit((tmp_path / "a.txt").write_bytes, b"0123456789")
        assert prepare(tmp_path / "a.txt", "--val_fraction", "0.5", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "o", "train") == [b"01234"] and documents(
        tmp_path / "o", "val"
    ) == [b"56789"]


FAULTY = {
    "no field": (
        {"x.jsonl": LINE},
        ["x.jsonl", "--field", "body"],
        ["x.jsonl: nothing to train on", "'body'", "--fi"],
    ),
    "only blank": (
        {"x.jsonl": b"\n \n"},
        ["x.jsonl"],
        ["x.jsonl: nothing to train on: no document"],
    ),
    "empty": ({"x.txt": b""}, ["x.txt"], ["1 empty (first: x.txt)"]),
    "empty table": ({"x.csv": b""}, ["x.csv"], ["1 empty (first: x.csv)"]),
    "empty array": ({"x.json": b"[ ]"}, ["x.json"], ["x.json: nothing to train on: no document"]),
    "other JSON": (
        {"x.json": b'{"a": [\n1]}'},
        ["x.json"],
        ["1 without a text in 'text' (--field) (first: x.json:1)"],
    ),
    "missing": ({}, ["x.txt"], ["x.txt: no such file"]),
    "missing JSON": ({}, ["d/x.json"], ["d/x.json: no such file"]),
    "other kind": (
        {"x.odt": b"a"},
        ["x.odt"],
        ["x.odt: no .txt .jsonl .ndjson .json .parquet .csv .arrow", "--ext"],
    ),
    "nothing in it": ({"d/x.odt": b"a"}, ["d"], ["d: no .txt .jsonl"]),
    "other ending": ({"x.txt": b"a"}, ["x.txt", "--ext", ".py,.md"], ["x.txt: no .py .md file"]),
    "fraction": ({"x.txt": b"a"}, ["x.txt", "--val_fraction", "1"], ["--val_fraction", "0.999"]),
    "size": ({"x.txt": b"a"}, ["x.txt", "--shard_mb", "0"], ["--shard_mb", "'0'"]),
    "endless": ({"x.txt": b"a"}, ["x.txt", "--shard_mb", "1e308"], ["--shard_mb", "'1e308'"]),
    "no input": ({}, [], ["INPUT"]),
    "empty name": ({"x.txt": b"a"}, ["x.txt", "--out", ""], ["--out: '' is not a path"]),
}


@pytest.mark.parametrize("files, arguments, said", FAULTY.values(), ids=FAULTY)
def test_faulty_input_is_one_line_and_leaves_no_shard(
    tmp_path, monkeypatch, capsys, files, arguments, said
):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    line = complaint(capsys, "prepare", "--out", "o", *arguments)
    assert all(part in line for part in said), line
    assert not Path("o").exists() or os.listdir("o") == []


# --------------------------------------------------------------------------------------------------
# The output directory

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


@pytest.mark.parametrize(
    "call, count", [("fsync", 2), ("fsync", 9), ("replace", 0), ("replace", 3)]
)
def test_a_killed_prepare_leaves_no_data_and_the_same_command_ends_byte_for_byte_the_same(
    mixed, tmp_path, call, count
):
    arguments, out = [str(mixed), "--shard_mb", "0.02", "--out"], tmp_path / "o"
    assert prepare(*arguments, tmp_path / "undisturbed") == 0
    command = [sys.executable, "-c", KILLED, call, str(count), "prepare", *arguments, out]
    assert (
        subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL and len(contents(out)) > 1
    )
    with pytest.raises(
        common.DataError, match="train-00002.bin: missing" if count == 3 else "no .bin file in it"
    ):
        open_data(str(out))
    write_shard(out / ".train-00077.bin.tmp", range(99))  # of a killed process with other inputs
    assert prepare(*arguments, out) == 0
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_shards_that_are_there_already_are_neither_mixed_with_others_nor_replaced(
    mixed, tmp_path, capsys
):
    assert prepare(mixed, "--out", tmp_path / "o") == 0
    write_shard(tmp_path / "p" / "below" / "x.bin", [1, 2])
    capsys.readouterr()
    for out in (tmp_path / "o", tmp_path / "p"):
        before = {path: path.read_bytes() for path in out.rglob("*.*")}
        assert complaint(capsys, "prepare", mixed / "a.txt", "--out", out).endswith(
            f"{out}: has shards already: use another --out, or delete it"
        )
        assert {path: path.read_bytes() for path in out.rglob("*.*")} == before


@pytest.mark.parametrize("call, place", [("fsync", "{out}"), ("replace", "{out}/metadata.json")])
def test_a_full_disk_is_one_line_with_a_path_and_a_remedy_and_leaves_nothing(
    mixed, tmp_path, monkeypatch, capsys, call, place
):
    def fail(*paths):
        raise OSError(errno.ENOSPC, "No space left on device", *map(str, paths[1:]))

    monkeypatch.setattr(os, call, fail)  # as the system does, os.fsync names no file
    line = complaint(capsys, "prepare", mixed, "--shard_mb", "0.02", "--out", tmp_path / "o")
    assert line.startswith(
        f"data.py: error: {place.format(out=tmp_path / 'o')}: No space left on device: "
    )
    assert "another --out" in line and os.listdir(tmp_path / "o") == []


LIMITED = """
import resource, sys, data
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(data.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "-"])
def test_an_error_of_writing_names_the_directory_and_one_of_reading_the_input(tmp_path, name):
    text = random.Random(0).randbytes(200_000)
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))

    def error(code: str, argument: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, "prepare", argument, "--out", tmp_path / "o"],
            cwd=ROOT,
            stdin=open(tmp_path / "a.txt"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and os.listdir(tmp_path / "o") == []
        return done.stderr.splitlines()[-1]

    argument = "-" if name == "-" else str(tmp_path / name)
    assert error(LIMITED, argument) == f"data.py: error: {tmp_path}/o: File too large"
    if name == "a.txt":  # a file whose bytes cannot be read
        (tmp_path / "b.txt").symlink_to("/proc/self/mem")
        line = error("import sys, data; sys.exit(data.main(sys.argv[1:]))", str(tmp_path / "b.txt"))
        assert line == f"data.py: error: {tmp_path}/b.txt: Input/output error"
    if name == "-":
        line = error("import sys, data; sys.stdin = None; sys.exit(data.main(sys.argv[1:]))", "-")
        assert line == "data.py: error: -: standard input is closed"


def test_a_link_of_the_name_of_a_temporary_shard_is_not_followed(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "victim").write_text("precious")
    out = tmp_path / "o"
    out.mkdir()
    (out / ".train-00000.bin.tmp").symlink_to(tmp_path / "victim")
    assert prepare(tmp_path / "a.txt", "--out", out) == 0  # there before
    (out / ".train-00000.bin.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):  # or made later
        ShardWriter(out, "train", 100).write([b"text"], common.ProgressBar("prepare"))
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_directory_for_shards_may_be_a_link(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "far").mkdir()
    (tmp_path / "o").symlink_to("far")
    assert prepare(tmp_path / "a.txt", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "far", "train") == [b"a tex"]


def test_two_that_prepare_into_one_directory_do_not_meet(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a text")
    with common.locked(tmp_path):
        assert "another process is using it" in complaint(
            capsys, "prepare", tmp_path / "a.txt", "--out", tmp_path
        )


def test_prepare_takes_little_memory_and_no_torch(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(100_000_000))
    with open(tmp_path / "b.jsonl", "wb") as file:
        file.write(LINE + b'{"text": "')
        file.truncate(200_000_000)  # a line of zeros that take no room on the disk
    with open(tmp_path / "c.json", "wb") as file:
        file.write(b'[{"text": "')
        file.truncate(200_000_000)
    code = """if True:
        import sys
        import data
        status = data.main(sys.argv[1:])
        assert "torch" not in sys.modules
        sys.exit(status)"""
    done, peak = measured(code, "prepare", tmp_path, "--out", tmp_path / "o")
    assert (
        done.returncode == 0
        and f"1 longer than 33,554,432 bytes (first: {tmp_path}/b.jsonl:2)" in done.stderr
    )
    assert f"there on (first: {tmp_path}/c.json:1)" in done.stderr
    assert peak < 160_000  # kB: the limit of a line, twice, and Python


def test_ctrl_c_leaves_nothing_and_status_130(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "data.py", "prepare", "-", "--out", tmp_path / "o"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not (tmp_path / "o").exists() and run.poll() is None:
        os.sched_yield()
    run.send_signal(signal.SIGINT)
    assert run.communicate()[1].endswith(b"data.py: interrupted\n") and run.returncode == 130
    assert os.listdir(tmp_path / "o") == []
