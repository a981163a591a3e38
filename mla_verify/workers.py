"""Processes that kernels run in: one for each set of environment variables that a library wants before it is imported.

A worker that dies, hangs or grows without end costs the question that it was asked, and nothing else; the next one gets
a new worker.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from mla_verify.watch import Watch
from mla_verify.worker_main import retire
from mla_verify.worker_process import WorkerDiedError, WorkerMemoryError, WorkerProcess, WorkerTimeoutError

__all__ = [
    "WorkerDiedError",
    "WorkerMemoryError",
    "WorkerTimeoutError",
    "ask",
    "close_idle_workers",
    "close_workers",
    "retire",
]

_T = TypeVar("_T")

# Those that nobody has asked anything just now, the one that rests longest first; and all of them.
_idle: list[tuple[frozenset[tuple[str, str]], WorkerProcess]] = []
_all: set[WorkerProcess] = set()
_MAX_IDLE = 2 * len(os.sched_getaffinity(0))  # each is a process of a few hundred MB
_lock = threading.Lock()


def ask(environment: Mapping[str, str], function: Callable[..., _T], *args: object, watch: Watch | None = None) -> _T:
    """`function(*args)` in a worker with these variables: an idle one, or a new one. Threads may ask at once.

    What it prints is repeated on our stderr, what it raises is raised here. watch: its limits, and the clocks to read
    afterwards. Raises WorkerDiedError when it ends, WorkerTimeoutError and WorkerMemoryError when it had to be ended.
    """
    key = frozenset(environment.items())
    with _lock:
        # One that ended while it was idle, for want of memory say, is no fault of the next question's.
        ended = [worker for _, worker in _idle if not worker.is_alive()]
        _idle[:] = [(other, worker) for other, worker in _idle if worker not in ended]
        _all.difference_update(ended)
        at = next((i for i, (other, _) in enumerate(_idle) if other == key), None)
        worker = WorkerProcess(environment) if at is None else _idle.pop(at)[1]
        _all.add(worker)
    for gone in ended:
        gone.kill()  # what it has started, and its id
    try:
        raised, answer, retires = worker.ask(function, args, watch or Watch())
    except BaseException:
        # Dead, or interrupted while it works on an answer that nobody waits for.
        with _lock:
            _all.discard(worker)
        worker.kill()
        raise
    with _lock:
        if not retires and worker in _all:  # not closed meanwhile
            _idle.append((key, worker))
        over = [worker] if retires else [_idle.pop(0)[1]] if len(_idle) > _MAX_IDLE else []
        _all.difference_update(over)
    for old in over:
        old.kill()
    if raised:
        raise answer
    return answer  # type: ignore[no-any-return]


def close_workers() -> None:
    """End all workers, also those at work: who waits for one gets WorkerDiedError. The next question starts new."""
    with _lock:
        ended = list(_all)
        _all.clear()
        _idle.clear()
    for worker in ended:
        worker.kill()


def close_idle_workers() -> None:
    """End the workers that nobody has asked anything: what memory they hold, of a GPU too, is free then."""
    with _lock:
        ended = [worker for _, worker in _idle]
        _all.difference_update(ended)
        _idle.clear()
    for worker in ended:
        worker.kill()


atexit.register(close_workers)
