"""Processes that kernels run in: one for each set of environment variables that a library wants before it is imported.

A worker that dies costs the question that it was asked, and nothing else; the next one gets a new worker.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, TypeVar

_T = TypeVar("_T")
_LOG_TAIL = 4000  # characters of what a dead worker wrote last
# Finds modules where we find them, whatever the current folder holds: nothing but sys is imported before.
_START = "import sys; sys.path[:] = {path!r}; from mla_verify.workers import main; main()"

# Those that nobody has asked anything just now, the one that rests longest first; and all of them.
_idle: list[tuple[frozenset[tuple[str, str]], _Worker]] = []
_all: set[_Worker] = set()
_MAX_IDLE = 2 * len(os.sched_getaffinity(0))  # each is a process of a few hundred MB
_lock = threading.Lock()


class WorkerDiedError(Exception):
    """The worker ended instead of answering. how: "killed by SIGSEGV", "exit code 3"; log: what it wrote last."""

    def __init__(self, how: str, log: str) -> None:
        super().__init__(how)
        self.how = how
        self.log = log


def ask(environment: Mapping[str, str], function: Callable[..., _T], *args: object) -> _T:
    """`function(*args)` in a worker with these variables: an idle one, or a new one. Threads may ask at once.

    What it prints is repeated on our stderr, what it raises is raised here. Raises WorkerDiedError when it ends.
    """
    key = frozenset(environment.items())
    with _lock:
        # One that ended while it was idle, for want of memory say, is no fault of the next question's.
        _idle[:] = [(other, worker) for other, worker in _idle if worker.is_alive()]
        at = next((i for i, (other, _) in enumerate(_idle) if other == key), None)
        worker = _Worker(environment) if at is None else _idle.pop(at)[1]
        _all.add(worker)
    try:
        raised, answer, retires = worker.ask(function, args)
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


_retires = False


def retire() -> None:
    """Called in a worker: this answer is its last. What it did may have left it in no state for another question."""
    global _retires
    _retires = True


def close_workers() -> None:
    """End all workers, also those at work: who waits for one gets WorkerDiedError. The next question starts new."""
    with _lock:
        ended = list(_all)
        _all.clear()
        _idle.clear()
    for worker in ended:
        worker.kill()


atexit.register(close_workers)


class _Worker:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._connection, theirs = Pipe()
        # Appended to, since both ends share the file's position.
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            # -u: what a kernel printed before it crashed must not stay in a buffer.
            [sys.executable, "-u", "-c", _START.format(path=sys.path), str(theirs.fileno())],
            env={**os.environ, **environment},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for us, and we end it
        )
        theirs.close()

    def ask(self, function: Callable[..., Any], args: tuple[object, ...]) -> tuple[bool, Any, bool]:
        """Whether it raised, what it raised or returned, and whether that was its last answer."""
        shown = os.fstat(self._log.fileno()).st_size
        try:
            self._connection.send_bytes(pickle.dumps((function, args)))
            raised, answer, retires = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise WorkerDiedError(self._how(), self._last_words(shown)) from None
        sys.stderr.write(self._written(shown))
        return raised, answer, retires

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _how(self) -> str:
        code = self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _last_words(self, start: int) -> str:
        """The end of what it wrote; of a fault handler's report the innermost calls, which come first."""
        text = self._written(start).partition("\nExtension modules:")[0]
        before, mark, report = text.rpartition("Fatal Python error:")
        return (before[-_LOG_TAIL:] + mark + report[:_LOG_TAIL]) if mark else text[-_LOG_TAIL:]

    def _written(self, start: int) -> str:
        self._log.seek(start)
        return self._log.read().decode(errors="replace")


def main() -> None:
    """The worker: answers questions until its other end is closed."""
    import faulthandler

    faulthandler.enable(all_threads=False)  # the one that crashed
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    while not _retires:
        try:
            question = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(question)
            answer = (False, function(*args), _retires)
        except Exception as error:
            answer = (True, error, _retires)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(_pickled(answer))


def _end_with(parent: int) -> None:
    """End when the tool is gone, whatever a kernel is still at. (An exit signal of Linux would go by the thread.)"""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _pickled(answer: tuple[bool, Any, bool]) -> bytes:
    try:
        text = pickle.dumps(answer)
        pickle.loads(text)  # an exception with arguments of its own may well pickle, and not come back
        return text
    except Exception:
        if not answer[0]:
            raise
        return pickle.dumps((True, RuntimeError(f"{type(answer[1]).__name__}: {answer[1]}"), answer[2]))
