"""sample.py --eval: the figures, their table, and what cannot be measured."""

import gzip
import json
import math
import os

import numpy as np
import pytest
import torch
from test_sample import refusal, trained  # noqa: F401

import sample
from conftest import final_state, metrics
from spider.data import prepare
from spider.inference.loading import load_model
from spider_model import Spider
from tokenizer import BOS_ID


def measured(tmp_path, *argv) -> list[dict]:
    assert sample.main([*map(str, argv), "--json", str(tmp_path / "out.json")]) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_a_prepared_directory_gives_the_figure_that_training_gave(trained, tmp_path):
    for batch in ((), ("--batch", 1), ("--batch", 4)):
        (found,) = measured(tmp_path, trained, "--eval", trained.parent / "data", *batch)
        assert found["bits_per_byte"] == pytest.approx(metrics(trained)[-1]["val_bpb"], rel=1e-5 if batch else 1e-12)
        assert found["bytes"] == 299 and found["n_loops"] == 2 and found["seq_len"] == 32
        assert found["checkpoint"] == str(trained / "spider-step3.pt") and found["file"] == str(trained.parent / "data")


def test_bits_are_those_of_the_bytes_alone_the_first_of_each_document_predicted_from_bos(trained, tmp_path):
    """Documents of each kind of file, within a window and longer than it; beside a sum by hand."""
    texts, model = ("abc de\xe9", "f", "gh abcdef " * 5), load_model(str(trained), torch.device("cpu"), Spider)[0]
    bits, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[BOS_ID, *text.encode()]])
        with torch.no_grad():
            bits += float(model(ids[:, :-1], ids[:, 1:], n_loops=2).nats_per_byte) * ids[0, 1:].numel() / math.log(2)
        count += len(text.encode())
    lines = "".join(json.dumps(dict(words=text)) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    np.concatenate([prepare.ids_of(text.encode(), True, True) for text in texts]).tofile(tmp_path / "a.bin")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.md").write_text(text)
    files = [tmp_path / name for name in ("a.jsonl", "a.jsonl.gz", "a.bin", "0.md", "1.md", "2.md")]
    *whole, first, second, third = measured(tmp_path, trained, "--eval", *files, "--field", "words", "--seq_len", 99,
                                            "--precision", "fp32")
    for found in whole:
        assert found["bytes"] == count and found["bits_per_byte"] == pytest.approx(bits / count, rel=1e-5)
    alone = [found["bytes"] * found["bits_per_byte"] for found in (first, second, third)]
    assert sum(alone) == pytest.approx(bits, rel=1e-5)


def test_the_figure_is_the_same_for_every_batch(trained, tmp_path):
    (tmp_path / "a.txt").write_text("abc def gh " * 40)
    figures = [measured(tmp_path, trained, "--eval", tmp_path / "a.txt", "--precision", "fp32", *batch)[0]
               for batch in ((), ("--batch", 1), ("--batch", 3), ("--batch", 1000))]
    assert {found["bytes"] for found in figures} == {440}
    assert all(found["bits_per_byte"] == pytest.approx(figures[0]["bits_per_byte"], rel=1e-6) for found in figures)


def test_checkpoints_texts_and_loops_stand_side_by_side_in_a_table(trained, tmp_path, capsys):
    (tmp_path / "a\x1b.txt").write_text("abc def")
    first, last = (trained / f"spider-step{step}.pt" for step in (1, 3))
    found = measured(tmp_path, first, last, "--n_loops", "2,1", "--eval", tmp_path / "a\x1b.txt",
                     trained.parent / "data")
    assert [(entry["checkpoint"], entry["n_loops"]) for entry in found] == [
        (str(path), n) for path in (first, last) for _ in range(2) for n in (2, 1)]
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "file", "bytes", "2", "loops", "1", "loop"]
    assert len(lines) == 4 and {len(line) for line in lines} == {len(head)} and all(map(str.isprintable, lines))
    for i, line in enumerate(lines):
        assert [float(part) for part in line.split()[-2:]] == [
            round(entry["bits_per_byte"], 4) for entry in found[2 * i:2 * i + 2]]


def test_what_cannot_be_measured_is_one_line(trained, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "no.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "bare").mkdir()
    np.array([97], "<u2").tofile(tmp_path / "one.bin")
    np.array([97, 300], "<u2").tofile(tmp_path / "odd.bin")
    os.mkfifo(tmp_path / "pipe.txt")
    for name, said in (("gone.txt", "No such file"), ("empty.txt", "no document"), ("no.jsonl", "--field"),
                       ("bare", "no .bin file"), ("one.bin", "no byte"), ("odd.bin", "id 300"), ("pipe.txt", "a pipe")):
        line = refusal(capsys, trained, "--eval", tmp_path / name)
        assert said in line and name in line
    (tmp_path / "a.txt").write_text("abc")
    assert "gone" in refusal(capsys, tmp_path / "gone", "--eval", tmp_path / "a.txt")
    assert "--eval" in refusal(capsys, trained, "--json", tmp_path / "out")
    assert sample.main([str(trained), "--eval", str(tmp_path / "a.txt"), "--json", str(tmp_path / "no" / "out")]) == 2
    assert "No such file" in capsys.readouterr().err
    state = final_state(trained)
    torch.save(state | dict(flags=state["flags"] | dict(seq_len=-5)), tmp_path / "flags.pt")
    assert "seq_len of the checkpoint's run: '-5'" in refusal(capsys, tmp_path / "flags.pt", "--eval",
                                                             tmp_path / "a.txt")
    state["model_state_dict"]["lm_head.weight"][0, 0] = math.nan
    torch.save(state, tmp_path / "ruined.pt")
    assert sample.main([str(tmp_path / "ruined.pt"), "--eval", str(tmp_path / "a.txt")]) == 2
    assert "its weights are ruined" in capsys.readouterr().err


def test_figures_that_could_go_nowhere_are_not_measured_first(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc")
    argv = ["no checkpoint", "--eval", str(tmp_path / "a.txt"), "--json", str(tmp_path / "gone" / "out")]
    assert sample.main(argv) == 2
    assert f"--json: {tmp_path / 'gone' / 'out'}: No such file or directory" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    for odd in (".", "/", tmp_path, tmp_path / "pipe"):
        line = refusal(capsys, "none", "--eval", tmp_path / "a.txt", "--json", odd)
        assert f"--json: {odd}: not a regular file" in line
