"""The one thread that owns the engine and the device; widget callbacks only enqueue. Refuses to know either of them.

Work that reaches a GPU from a second thread can break a graph capture, and a callback that blocks freezes every
other control. So a panel's callback submits a job and returns, one thread runs the jobs in order, and a lock keeps a
learner's own cells off the device meanwhile (`with labkit.lab.device(): …`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

#: Held by the worker while a job runs, and by a learner's cell that uses an engine of its own.
_device_lock = threading.RLock()


def strict() -> bool:
    """LABKIT_STRICT=1: an error raises instead of becoming a card (tests and continuous integration)."""
    return os.environ.get("LABKIT_STRICT") == "1"


@contextlib.contextmanager
def device() -> Iterator[None]:
    """Keep panels off the device while a cell uses it; waits for the job that is running."""
    with _device_lock:
        yield


class Job:
    """One piece of work. `cancel()` asks it to stop; it looks at `should_stop()` between steps, never inside one."""

    def __init__(
        self,
        name: str,
        work: Callable[[Job], Any],
        on_error: Callable[[BaseException], None] | None,
        on_dropped: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.result: Any = None
        self._work, self._on_error, self._on_dropped = work, on_error, on_dropped
        self._seen = False
        self._stop, self._done = threading.Event(), threading.Event()

    def cancel(self) -> None:
        self._stop.set()

    def should_stop(self) -> bool:
        return self._stop.is_set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """The result once the job has ended. An interrupt of the waiting cell stops the job first.

        Raises:
            TimeoutError: it is still running.
            Exception: whatever the job raised, under LABKIT_STRICT=1 or when nothing was there to show it.
        """
        try:
            ended = self._done.wait(timeout)
        except KeyboardInterrupt:
            self.cancel()
            raise
        if not ended:
            raise TimeoutError(f"{self.name} is still running after {timeout} s")
        if self.error is not None and (strict() or self._on_error is None):
            self._seen = True
            raise self.error
        return self.result

    def _run(self) -> None:
        try:
            with _device_lock:
                self.result = self._work(self)
        except Exception as error:
            self.error = error
            if strict() or self._on_error is None:
                traceback.print_exception(error, file=sys.__stderr__)
            else:
                self._on_error(error)
        finally:
            self._done.set()

    def _drop(self) -> None:
        try:
            if self._on_dropped is not None:
                self._on_dropped()
        except Exception as error:
            traceback.print_exception(error, file=sys.__stderr__)
        finally:
            self._done.set()


class Worker:
    """A queue of jobs and the thread that runs them in order. The thread starts with the first job.

    Under LABKIT_STRICT=1 an error that nobody waited for is raised by the next `submit` or `join`: it is never lost.
    """

    def __init__(self, name: str = "labkit-worker") -> None:
        self._name = name
        self._queue: queue.Queue[Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._pending: list[Job] = []

    def submit(
        self,
        work: Callable[[Job], Any],
        name: str,
        on_error: Callable[[BaseException], None] | None = None,
        on_dropped: Callable[[], None] | None = None,
    ) -> Job:
        """Enqueue `work(job)` and return at once; `on_dropped()` is called if it is stopped while it waits."""
        self._raise_unseen()
        job = Job(name, work, on_error, on_dropped)
        with self._guard:
            self._pending.append(job)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(job)
        return job

    @property
    def busy(self) -> bool:
        with self._guard:
            return any(not job.done for job in self._pending)

    def join(self, timeout: float | None = None) -> None:
        """Wait until every job submitted so far has ended; under LABKIT_STRICT=1 raise the first error."""
        with self._guard:
            jobs = list(self._pending)
        for job in jobs:
            job.wait(timeout)
        self._raise_unseen()

    def close(self, timeout: float = 5.0) -> None:
        """Stop what runs, drop what waits, end the thread."""
        with self._guard:
            thread, self._thread = self._thread, None
            for job in self._pending:
                job.cancel()
        if thread is not None and thread.is_alive():
            self._queue.put(None)
            thread.join(timeout)

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.should_stop():
                job._drop()
            else:
                job._run()

    def _raise_unseen(self) -> None:
        with self._guard:
            ended = [job for job in self._pending if job.done]
            self._pending = [job for job in self._pending if not job.done]
        for job in ended:
            if job.error is not None and not job._seen and strict():
                raise job.error


_shared: Worker | None = None


def shared_worker() -> Worker:
    """The worker of this process: all panels of a notebook use one, since they share one device."""
    global _shared
    if _shared is None:
        _shared = Worker()
        atexit.register(_shared.close)
    return _shared
