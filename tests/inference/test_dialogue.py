"""A dialogue: what the model reads and writes in each turn, and Ctrl-C in the midst of one."""

import builtins
import io
import os
import signal
import subprocess
import sys

import pytest

from conftest import ROOT, awake, small_config
from spider.inference import dialogue
from spider.inference.dialogue import Sampling, converse
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID


def hold(monkeypatch, capsysbinary, model, turns: list[str], go_on=Spider.generate_batch) -> list[bytes]:
    """Return what a model writes in each turn of a dialogue, greedily and up to 9 bytes."""
    lines, written = iter(turns), []

    def ask(prompt):
        written.append(capsysbinary.readouterr().out[:-1])
        if (line := next(lines, None)) is None:
            raise EOFError
        return line
    monkeypatch.setattr(builtins, "input", ask)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    sampling = Sampling(bytes=9, temperature=0, top_k=None, top_p=None, samples=1, seed=0, raw=True)
    converse(model, model.decoding_state(), lambda logits, state: go_on(model, logits, state, 9, temperature=0),
             sampling)
    return written[1:]


def test_a_dialogue_continues_from_all_that_was_typed_and_written(monkeypatch, capsysbinary):
    model, text = awake(small_config(), seed=1).eval(), b""
    turns = ["ab", "", "c\\", "d", "", os.fsdecode(b"\xff")]
    written = hold(monkeypatch, capsysbinary, model, turns)
    assert written.pop(2) == b""                          # the break of the line that went on
    for said, answer in zip((b"ab", b"", b"c\nd", b"", b"\xff"), written):
        text += b"\n" * bool(said and text and not text.endswith(b"\n")) + said
        assert answer == bytes(model.generate([BOS_ID, *text], 9, temperature=0)) and len(answer) == 9
        text += answer


def test_ctrl_c_ends_a_turn_and_what_was_written_till_then_stays_in_context(monkeypatch, capsysbinary):
    model = awake(small_config(), seed=1).eval()

    def interrupted(*args, **kwargs):
        for number, column in enumerate(Spider.generate_batch(*args, **kwargs)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield column
    first, second = hold(monkeypatch, capsysbinary, model, ["ab", "cd"], interrupted)
    assert first == bytes(model.generate([BOS_ID, *b"ab"], 4, temperature=0))
    assert second == bytes(model.generate([BOS_ID, *b"ab", *first, *b"\ncd"], 4, temperature=0))
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_behind_the_end_of_a_document_a_dialogue_begins_another(monkeypatch, capsysbinary):
    model, fed = awake(small_config(), seed=1).eval(), []
    read = dialogue.read
    monkeypatch.setattr(dialogue, "read", lambda model, state, ids: fed.append(ids) or read(model, state, ids))
    hold(monkeypatch, capsysbinary, model, ["ab", "c", ""], lambda *args, **kwargs: iter([[100]]))
    assert fed == [[BOS_ID, *b"ab"], [EOS_ID, BOS_ID, *b"c"], [EOS_ID, BOS_ID]]


@pytest.mark.slow
def test_where_interrupts_are_ignored_as_in_a_background_job_the_tests_of_them_pass():
    tests = ("tests/inference/test_dialogue.py", "tests/data/test_inputs.py", "tests/training/test_interruption.py",
             "-k", "ctrl_c or finishes_the_step and None")
    done = subprocess.run([sys.executable, "-m", "pytest", "-qx", *tests], cwd=ROOT, text=True, capture_output=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 0, done.stdout
