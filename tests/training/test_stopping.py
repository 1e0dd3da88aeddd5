"""Stopping: signals, and every way out of the loop."""

import os
import signal
import time

import pytest

from spider.training import stopping


def test_a_signal_that_came_before_an_evaluation_ends_it_in_its_body_and_not_before():
    with stopping.StopSignals() as stop:
        run = stopping.Stopping(stop, None, 0, 10, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        with run.pause(1):
            time.sleep(10)
            pytest.fail("the evaluation was not cut short")
        assert run.drops()
