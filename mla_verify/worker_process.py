"""One worker, seen from the tool: started, asked, watched, ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from mla_verify.watch import TICK, OutOfMemoryError, OverrunError, Watch
from mla_verify.wire import pair
from mla_verify.worker_main import ANSWER, CALL_BEGINS, STACK_SIGNAL

_LOG_TAIL = 4000  # characters of what a dead worker wrote last
_THREAD = re.compile(r"(?:Current thread|Thread) 0x\w+.*\(most recent call first\):")
_STACK_SECONDS = 0.2  # in which a worker that hangs writes where
# Of a process that was killed while the device works for it, the driver has to clear up first.
_DEATH_SECONDS = 60
_CLOSED_SECONDS = 5  # from the end of the connection to that of the process
# Finds modules where we find them, whatever the current folder holds: nothing but sys is imported before.
_START = "import sys; sys.path[:] = {path!r}; from mla_verify.worker_main import main; main()"


class WorkerDiedError(Exception):
    """The worker ended instead of answering. how: "killed by SIGSEGV", "exit code 3"; log: what it wrote last."""

    def __init__(self, how: str, log: str) -> None:
        super().__init__(how)
        self.how = how
        self.log = log


class WorkerTimeoutError(WorkerDiedError):
    """It was killed for taking too long. The log ends with the calls that it was in."""


class WorkerMemoryError(WorkerDiedError):
    """It was killed for taking the machine's memory."""


class WorkerProcess:
    """A process that answers one question at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._channel, theirs = pair()
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
            start_new_session=True,  # Ctrl-C is for us, and we end it, with all that it has started
        )
        theirs.close()

    def ask(self, function: Callable[..., Any], args: tuple[object, ...], watch: Watch) -> tuple[bool, Any, bool]:
        """Whether it raised, what it raised or returned, and whether that was its last answer."""
        shown = os.fstat(self._log.fileno()).st_size
        watch.begin(self._process.pid)
        try:
            self._channel.send(pickle.dumps((function, args)))
            raised, answer, retires = self._answer(watch)
        except (EOFError, ConnectionError):
            raise WorkerDiedError(self._how(), self._last_words(shown)) from None
        except OverrunError as error:
            how = f"{error}; its process was killed"
            if isinstance(error, OutOfMemoryError):
                self.kill()  # at once: it goes on growing
                raise WorkerMemoryError(how, self._last_words(shown)) from None
            self._write_stack()
            raise WorkerTimeoutError(how, self._last_words(shown)) from None
        finally:
            watch.end()
        sys.stderr.write(self._written(shown))
        return raised, answer, retires

    def _answer(self, watch: Watch) -> tuple[bool, Any, bool]:
        while True:
            while not self._channel.ready(TICK):
                # A process that it has started may hold its end of the connection open.
                if not self.is_alive() and not self._channel.ready(0):
                    raise EOFError
                watch.check()
            kind, *content = self._channel.receive()
            if kind == ANSWER:
                raised, answer, retires = content
                return raised, answer, retires
            if kind == CALL_BEGINS:
                watch.call_begins()
            else:
                watch.call_ends()

    def is_alive(self) -> bool:
        """Whether it runs. One that has ended is not waited for yet, so that its id stays its own."""
        if self._process.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # another thread has just waited for it
            return False

    def kill(self) -> None:
        """End it, and what it has started: compilers, say."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_DEATH_SECONDS)

    def _how(self) -> str:
        end = time.monotonic() + _CLOSED_SECONDS
        while self.is_alive():
            if time.monotonic() > end:
                return "it closed its connection and went on; it was killed"
            time.sleep(0.001)
        self.kill()  # what it has started
        code = self._process.returncode
        if code is None:
            return "its end cannot be seen"
        if code >= 0:
            return f"exit code {code}"
        known = -code in set(signal.Signals)  # real-time signals have numbers alone
        return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"

    def _write_stack(self) -> None:
        self._process.send_signal(STACK_SIGNAL)
        time.sleep(_STACK_SECONDS)

    def _last_words(self, start: int) -> str:
        """The end of what it wrote; of a fault handler's report the innermost calls, which come first."""
        text = self._written(start).partition("\nExtension modules:")[0]
        before, mark, report = text.rpartition("Fatal Python error:")
        if mark:
            return before[-_LOG_TAIL:] + mark + report[:_LOG_TAIL]
        if len(stacks := _THREAD.split(text)) > 1:
            # Of all threads, the one that calls the kernel, which is the first and is written last.
            return stacks[0][-_LOG_TAIL:] + "Stack (most recent call first):" + stacks[-1][:_LOG_TAIL]
        return text[-_LOG_TAIL:]

    def _written(self, start: int) -> str:
        self._log.seek(start)
        return self._log.read().decode(errors="replace")
