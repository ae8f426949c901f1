"""Threads for strangers: limits, exceptions, workers that are replaced although nobody waits for what they do."""

from __future__ import annotations

import threading
import time

import pytest
from fakes import HANG, NEVER

from hsg.play.pool import CallTimeout, Pool


def test_values_come_from_the_calls() -> None:
    pool = Pool(3, 5.0)
    calls = [pool.submit(pow, n, 2) for n in range(20)]
    assert [pool.result(call) for call in reversed(calls)] == [n * n for n in reversed(range(20))]


def test_calls_run_in_parallel() -> None:
    pool, barrier = Pool(3, 30.0), threading.Barrier(3)
    calls = [pool.submit(barrier.wait, 20.0) for _ in range(3)]
    assert sorted(pool.result(call) for call in calls) == [0, 1, 2]


def fail(error: BaseException) -> None:
    raise error


def test_what_a_call_raises_is_raised_where_it_is_awaited() -> None:
    pool = Pool(1, 5.0)
    with pytest.raises(KeyError, match="gone"):
        pool.result(pool.submit(fail, KeyError("gone")))
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        pool.result(pool.submit(fail, SystemExit(3)))
    assert pool.result(pool.submit(pow, 2, 3)) == 8  # the worker lives on


def test_limit_counts_from_the_beginning_of_the_call() -> None:
    """Five calls of half a second queue for one worker; each stays far within two seconds, all together do not."""
    pool = Pool(1, 2.0)
    calls = [pool.submit(time.sleep, 0.5) for _ in range(5)]
    for call in reversed(calls):
        assert pool.result(call) is None


def test_call_that_hangs_is_given_up_and_its_worker_replaced() -> None:
    pool = Pool(1, 0.2)
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(CallTimeout, match=r"0\.2 seconds"):
            pool.result(pool.submit(time.sleep, NEVER))
    assert pool.result(pool.submit(pow, 2, 3)) == 8
    assert time.monotonic() - began < HANG
    assert pool.waited_seconds >= 0.6


def test_calls_that_nobody_awaits_do_not_block_the_others() -> None:
    """Both workers hang in calls like `close`, whose results nobody asks for."""
    pool = Pool(2, 0.2)
    for _ in range(4):
        pool.submit(time.sleep, NEVER)
    box: list[int] = []
    waiting = threading.Thread(target=lambda: box.append(pool.result(pool.submit(pow, 2, 3))), daemon=True)
    waiting.start()
    waiting.join(HANG)
    assert box == [8]


def test_worker_that_was_given_up_ends_when_its_call_does() -> None:
    pool, gate = Pool(1, 0.1), threading.Event()
    call = pool.submit(gate.wait, NEVER)
    with pytest.raises(CallTimeout):
        pool.result(call)
    gate.set()
    assert call.worker is not None
    call.worker.join(HANG)
    assert not call.worker.is_alive()


def test_close_lets_the_workers_go() -> None:
    before = set(threading.enumerate())
    pool = Pool(3, 5.0)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 3
    pool.close()
    for thread in mine:
        thread.join(HANG)
    assert not any(thread.is_alive() for thread in mine)


def test_idle_workers_have_ended_when_it_is_closed() -> None:
    """One that hangs is not waited for longer than a second."""
    before = set(threading.enumerate())
    pool = Pool(3, 60.0)
    assert pool.result(pool.submit(lambda: 1)) == 1
    pool.close()
    assert set(threading.enumerate()) == before
    stuck, pool = threading.Event(), Pool(2, 60.0)
    pool.submit(stuck.wait)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 30
    assert len(set(threading.enumerate()) - before) == 1
    stuck.set()
