"""Worker processes: order, errors, kills; that they end with their owner is in first_hour."""

import os
import signal
import time

import pytest

from kalman_attention._processes import worker_processes

pytestmark = pytest.mark.slow

READY = []


class Peculiar(Exception):
    """Cannot be put together again from its message."""

    def __init__(self, message, place):
        super().__init__(message)
        self.place = place


def get_ready():
    READY.append(os.getpid())


def work(number):
    """Later numbers are ready earlier."""
    assert [os.getpid()] == READY
    time.sleep(0.05 * (4 - number % 4))
    if number == 100:
        raise Peculiar("a peculiar error", 3)
    if number == 101:
        raise ValueError("an error that users understand")
    if number == 102:
        os.kill(os.getpid(), signal.SIGKILL)
    return bytes([number % 256]) * 1_000_000  # more than a pipe holds


def test_results_in_order_and_as_they_come():
    with worker_processes(2, get_ready) as workers:
        for number, result in workers.in_order(work, iter(range(7))):
            assert result == bytes([number]) * 1_000_000
        assert [n for n, _ in workers.in_order(work, range(9))] == list(range(9))
        seen = []
        found = dict(workers.as_completed(work, range(5), seen.append))
        assert sorted(found) == list(range(5))
        assert all(len(running) <= 2 for running in seen)
        pids = [worker.process.pid for worker in workers._workers]
    assert len(set(pids)) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_errors_say_what_and_where():
    with worker_processes(1, get_ready) as workers:
        with pytest.raises(ValueError, match="an error that users understand") as caught:
            list(workers.in_order(work, [101]))
        assert "in work" in str(caught.value.__cause__)
        with pytest.raises(RuntimeError, match="Peculiar: a peculiar error"):
            list(workers.as_completed(work, [100], lambda running: None))
        with pytest.raises(ChildProcessError, match="killed by signal 9, perhaps because mem"):
            list(workers.in_order(work, [102]))
        with pytest.raises(ChildProcessError, match="killed by signal 9"):
            list(workers.in_order(work, [1]))
