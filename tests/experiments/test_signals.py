"""Stopping: at a safe point, or at once where nothing can be lost by it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from racelab.experiments.signals import StopAtOnce, StopRequest


def test_a_request_waits_outside_and_ends_the_work_at_once_inside() -> None:
    with StopRequest() as stop:
        with stop.at_once():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.exit_code == 143
        with pytest.raises(StopAtOnce), stop.at_once():
            raise AssertionError("it was asked to stop before")

    with StopRequest() as stop:
        began = time.monotonic()
        with pytest.raises(StopAtOnce), stop.at_once():
            interrupted_sleep()
        assert (stop.exit_code, time.monotonic() - began < 20) == (130, True)


def interrupted_sleep() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)


def test_a_second_ctrl_c_is_still_an_interrupt() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGINT
