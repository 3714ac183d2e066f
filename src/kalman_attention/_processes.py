"""Worker processes that end with the process that started them, however it ends.

A worker is connected to its owner by one pipe, which a thread of the worker reads. End of file
means that the owner is gone, even if it was killed. Only pipes are used, because semaphores need a
shared-memory file system such as /dev/shm.
"""

import os
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context, reduction
from typing import Any, TypeVar

A = TypeVar("A")
R = TypeVar("R")

# Schedulers allow 10 to 30 seconds between SIGTERM and SIGKILL.
GRACE = 10.0
"""Seconds that a worker has to save its work after it was told to stop."""

# A terminal sends these to all of its processes; only the owner reacts.
_FOR_THE_OWNER = [
    getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGBREAK") if hasattr(signal, name)
]


class Workers:
    """Processes that compute one call at a time; created by ``worker_processes``."""

    def __init__(self, count: int, start: Callable[[], object] | None) -> None:
        self._count, self._start = count, start
        self._workers: list[_Worker] = []

    def in_order(self, function: Callable[[A], R], arguments: Iterable[A]) -> Iterator[tuple[A, R]]:
        """Call a function in the workers; yields arguments and results in order.

        Args:
            function: a function that workers can import by name.
            arguments: consumed on demand, two per worker ahead.

        Raises:
            ChildProcessError: a worker was killed. Errors of the function are raised unchanged.
        """
        running: deque[tuple[_Worker, A]] = deque()
        for number, argument in enumerate(arguments):
            worker = self._worker(number % self._count)
            worker.send(function, argument)
            running.append((worker, argument))
            # Two per worker: the next call is there when the current one ends.
            if len(running) == 2 * self._count:
                worker, argument = running.popleft()
                yield argument, worker.receive()
        for worker, argument in running:
            yield argument, worker.receive()

    def as_completed(
        self,
        function: Callable[[A], R],
        arguments: Sequence[A],
        watch: Callable[[Sequence[A]], None],
    ) -> Iterator[tuple[A, R]]:
        """Call a function in the workers; yields arguments and results as they complete.

        Args:
            function: a function that workers can import by name.
            arguments: one per call.
            watch: called about once a second with the arguments of the running calls.

        Raises:
            ChildProcessError: a worker was killed. Errors of the function are raised unchanged.
        """
        waiting, running = deque(arguments), dict[connection.Connection, tuple[_Worker, A]]()
        idle = [self._worker(i) for i in range(min(self._count, len(waiting)))]
        while waiting or running:
            while idle and waiting:
                worker, argument = idle.pop(), waiting.popleft()
                worker.send(function, argument)
                running[worker.connection] = worker, argument
            watch([argument for _, argument in running.values()])
            for ready in connection.wait(list(running), timeout=1.0):
                assert isinstance(ready, connection.Connection)
                worker, argument = running.pop(ready)
                result = worker.receive()
                idle.append(worker)
                yield argument, result

    def stop(self) -> None:
        """End all workers, leaving them a few seconds to save their work."""
        try:
            for worker in self._workers:
                worker.process.terminate()
            end = time.monotonic() + GRACE
            for worker in self._workers:
                worker.process.join(max(0.0, end - time.monotonic()))
        finally:  # also if a second Ctrl-C arrives while they save
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()
                worker.connection.close()

    def _worker(self, number: int) -> "_Worker":
        """A worker by number, started on first use."""
        while len(self._workers) <= number:
            self._workers.append(_Worker(self._start))
        return self._workers[number]


@contextmanager
def worker_processes(count: int, start: Callable[[], object] | None = None) -> Iterator[Workers]:
    """Worker processes that end with the block, or with this process.

    SIGTERM reaches a worker as usual; Ctrl-C and a closed terminal are handled by the owner.

    Args:
        count: maximum number of workers.
        start: function that each worker calls first.
    """
    workers = Workers(count, start)
    try:
        yield workers
    finally:
        workers.stop()


class _Worker:
    """The owner's side of one worker."""

    def __init__(self, start: Callable[[], object] | None) -> None:
        context = get_context("spawn")  # forking a process with threads is not safe
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, start), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, function: Callable[[A], Any], argument: A) -> None:
        try:
            self.connection.send((function, argument))
        except OSError:
            raise self._killed() from None

    def receive(self) -> Any:
        try:
            result, error, where = self.connection.recv()
        except (EOFError, OSError):
            raise self._killed() from None
        if error is not None:
            raise error from _InWorkerError(where)
        return result

    def _killed(self) -> ChildProcessError:
        self.process.join(1.0)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
        reason = ", perhaps because memory ran out" if code == -9 else ""
        return ChildProcessError(
            f"a worker process {how}{reason}. Nothing that was finished is lost: run the same "
            "command again to continue."
        )


class _InWorkerError(Exception):
    """The traceback of an error in a worker, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _serve(owner: "connection.Connection[Any, Any]", start: Callable[[], object] | None) -> None:
    """The main loop of a worker: process calls until the owner is gone."""
    for number in _FOR_THE_OWNER:
        signal.signal(number, signal.SIG_IGN)
    calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(owner, calls), daemon=True).start()
    if start is not None:
        start()
    while True:
        function, argument = calls.get()
        try:
            reply: tuple[Any, Exception | None, str] = (function(argument), None, "")
        except SystemExit:  # stopped, and saved; a regular exit of torch takes a second
            os._exit(1)
        except Exception as error:
            reply = (None, _that_travels(error), traceback.format_exc())
        try:
            owner.send(reply)
        except OSError:
            os._exit(1)  # the owner is gone


def _listen(
    owner: "connection.Connection[Any, Any]",
    calls: "queue.SimpleQueue[tuple[Callable[[Any], Any], Any]]",
) -> None:
    try:
        while True:
            calls.put(owner.recv())
    except (EOFError, OSError):
        os._exit(1)  # immediately: files are atomic, and nobody waits for a result


def _that_travels(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be pickled."""
    try:
        reduction.ForkingPickler.loads(reduction.ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
