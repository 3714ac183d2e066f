"""Worker processes that end with the process that started them, whatever ends it.

A worker is joined to its owner by one pipe, which a thread of the worker reads. End of file means
that the owner is gone: ended, or killed without a chance to say so. Pipes are all that is used, so
that nothing depends on semaphores, which need a shared-memory file system such as /dev/shm.
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

GRACE = 10.0
"""Seconds in which a worker that is told to stop may save its work; schedulers allow 10 to 30."""

# A terminal sends these to all processes that belong to it: the owner decides what they mean.
_FOR_THE_OWNER = [
    getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGBREAK") if hasattr(signal, name)
]


class Workers:
    """Processes that compute one call at a time; made by ``worker_processes``."""

    def __init__(self, count: int, start: Callable[[], object] | None) -> None:
        self._count, self._start = count, start
        self._workers: list[_Worker] = []

    def in_order(self, function: Callable[[A], R], arguments: Iterable[A]) -> Iterator[tuple[A, R]]:
        """Call a function in the workers; arguments and results in the order of the arguments.

        Args:
            function: found by its name in the workers too.
            arguments: read as they are needed, two for each worker.

        Raises:
            ChildProcessError: a worker was killed. Errors of the function are raised as they are.
        """
        running: deque[tuple[_Worker, A]] = deque()
        for number, argument in enumerate(arguments):
            worker = self._worker(number % self._count)
            worker.send(function, argument)
            running.append((worker, argument))
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
        """Call a function in the workers; arguments and results as they are ready.

        Args:
            function: found by its name in the workers too.
            arguments: one for each call.
            watch: called about once a second with the arguments of the calls under way.

        Raises:
            ChildProcessError: a worker was killed. Errors of the function are raised as they are.
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
        """End all workers: those that compute may save first, for a few seconds."""
        try:
            for worker in self._workers:
                worker.process.terminate()
            end = time.monotonic() + GRACE
            for worker in self._workers:
                worker.process.join(max(0.0, end - time.monotonic()))
        finally:  # also when a second Ctrl-C comes while they save
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()
                worker.connection.close()

    def _worker(self, number: int) -> "_Worker":
        """One of the workers, started when it is first needed."""
        while len(self._workers) <= number:
            self._workers.append(_Worker(self._start))
        return self._workers[number]


@contextmanager
def worker_processes(count: int, start: Callable[[], object] | None = None) -> Iterator[Workers]:
    """Processes for calls; they are gone when the block is left, or when this process is.

    SIGTERM reaches a worker as usual; Ctrl-C and the end of the terminal are left to the owner.

    Args:
        count: how many, at most.
        start: called first in each of them.
    """
    workers = Workers(count, start)
    try:
        yield workers
    finally:
        workers.stop()


class _Worker:
    """The owner's side of one worker."""

    def __init__(self, start: Callable[[], object] | None) -> None:
        context = get_context("spawn")  # forking a process that has threads is not safe
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
        reason = ", perhaps for want of memory" if code == -9 else ""
        return ChildProcessError(
            f"a worker process {how}{reason}. Nothing that was finished is lost: the same command "
            "goes on where it stopped."
        )


class _InWorkerError(Exception):
    """The traceback of an error in a worker, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _serve(owner: "connection.Connection[Any, Any]", start: Callable[[], object] | None) -> None:
    """A worker's life: calls one after the other, and the end when the owner is gone."""
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
        except SystemExit:  # told to stop, it has saved; tidying up takes torch a second
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
        os._exit(1)  # at once: what is written so far is whole, and nobody waits for more


def _that_travels(error: Exception) -> Exception:
    """The error, or its text if it cannot be taken apart and put together again."""
    try:
        reduction.ForkingPickler.loads(reduction.ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
