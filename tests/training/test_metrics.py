"""metrics.jsonl: complete, in order, JSON for any reader."""

import math

import pytest
from conftest import metrics, run

from spider.training.metrics import Metrics


def test_metrics_that_a_full_disk_refuses_are_written_later_in_order(tmp_path, capsys):
    with Metrics(tmp_path / "metrics.jsonl", 0, False) as lines:
        real = lines.file
        for step in range(6):
            lines.file = open("/dev/full", "wb", buffering=0) if step in (1, 2, 3) else real
            lines.write(dict(step=step, loss=math.nan))
        lines.sync()
        lines.file = open("/dev/full", "wb", buffering=0)
        lines.write(dict(step=6))
        with pytest.raises(OSError):                       # and so no checkpoint is newer than the lines before it
            lines.sync()
    assert metrics(tmp_path) == [dict(step=step, loss=None) for step in range(6)]


def test_a_line_of_metrics_that_a_kill_cut_short_is_dropped(tmp_path, shards):
    directory = run(tmp_path, shards, steps=2)
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    run(tmp_path, shards, steps=4)
    assert [line["step"] for line in metrics(directory)] == [1, 2, 3, 4]


def test_a_non_finite_number_in_metrics_is_null_again_when_a_run_resumes(tmp_path, shards):
    """Where an earlier version, or somebody else, wrote it: lines are JSON for any reader."""
    directory, foreign = run(tmp_path, shards, steps=2), []
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        foreign.append(line.replace('"step": 1,', '"step": 1, "a": NaN, "b": Infinity, "c": -Infinity, "d": 1e999,'))
    foreign += ['{"step": Infinity}', '{"step": -1}', '{"step": 1.0}']
    (directory / "metrics.jsonl").write_text("\n".join(foreign))
    run(tmp_path, shards, steps=3)
    lines = metrics(directory)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [lines[0].get(name, 0) for name in "abcd"] == [None] * 4 and lines[0]["loss"] > 1
    assert not any(word in (directory / "metrics.jsonl").read_text() for word in ("NaN", "Infinity"))
