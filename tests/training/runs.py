"""Shared by tests of whole runs: comparison of runs, runs in processes of their own, the state of a run."""

import os
import resource
import sys
import time

import pytest
from conftest import assert_same, do_nothing_slow, final_state, make_shards, metrics, run

import train
from spider.data import loader
from spider.training import run_directory


def assert_same_runs(one, other):
    """Weights, optimizers, expert bias, best loss, position and every line of metrics.jsonl."""
    assert_same(final_state(one), final_state(other))
    assert metrics(one) == metrics(other)


def child(argv, log, slow=None, file_limit=None, patience=train.STEP_PATIENCE, deaf=False):
    """A run in a forked process, stderr in a file; a function named `slow` ("module.name") takes a minute instead."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    do_nothing_slow()
    train.STEP_PATIENCE = patience
    if slow:
        module, name = slow.split(".")

        def sleep(*_):
            print("SLEEPS", file=sys.stderr, flush=True)
            time.sleep(60)
        setattr({"train": train, "loader": loader, "run_directory": run_directory}[module], name, sleep)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    if deaf:                                                     # whoever read stderr is gone
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 2)
    sys.exit(train.command_line(argv))


def start(processes, tmp_path, argv, **faults):
    process = processes.Process(target=child, args=(argv, str(tmp_path / "log")), kwargs=faults)
    process.start()
    return process


def until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_said(tmp_path, words):
    log = tmp_path / "log"
    until(lambda: log.exists() and words in log.read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The state of a checkpoint after one step."""
    directory = tmp_path_factory.mktemp("trained")
    return final_state(run(directory, make_shards(directory / "data"), steps=1))
