"""Signals that are remembered until a good point, raised at once where there is nothing to save, and given back."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from hsg.ranks import stopping
from hsg.ranks.stopping import Stopped, check, handlers, patience, received


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_waits_for_a_good_point(number: int, status: int) -> None:
    with handlers():
        check()
        with patience():
            signal.raise_signal(number)
            assert received() == number
            signal.raise_signal(number)  # what a launcher passes on is the same request
            with pytest.raises(Stopped) as stopped:
                check()
        assert stopped.value.status == status
        assert not isinstance(stopped.value, Exception)


def test_signal_is_raised_at_once_where_nobody_is_patient() -> None:
    with handlers(), pytest.raises(Stopped, match="stopped by SIGTERM"):
        signal.raise_signal(signal.SIGTERM)


def test_handlers_are_given_back_and_what_came_is_forgotten() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with handlers(), patience():
        signal.raise_signal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    with handlers():
        check()


def test_second_signal_ends_the_process() -> None:
    """Even inside patience, and without any clean-up."""
    code = (
        "import signal, time\n"
        "from hsg.ranks import stopping\n"
        "with stopping.handlers(), stopping.patience():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    time.sleep(2 * stopping.SAME_SECONDS)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "")
    assert stopping.STATUS[signal.SIGTERM] == 143
