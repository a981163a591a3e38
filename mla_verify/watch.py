"""What a worker may take: time for a kernel call, for compiling and for all else, and memory of the machine."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mla_verify import memory
from mla_verify.compilers import compiler_below
from mla_verify.memory import GIB

# Of one kernel call. A thousandth of that is a long call on a GPU; the interpreter takes seconds for its largest cases.
DEFAULT_TIMEOUT = 120.0
# FlashInfer's MLA kernels compile for 18 s on 16 cores, hence some minutes on one; a compiler that hangs must end.
COMPILING_SECONDS = 900.0
# Imports of large libraries from a cold disk take a minute, and so do the inputs of 7 million keys.
ANSWER_SECONDS = 600.0
# A worker is ended before the system has to choose whom to end for want of memory: when this much is left ...
_RESERVE = 2 * GIB
_RESERVE_PART = 1 / 16  # ... or this part of a small machine ...
# ... and it is the worker that grew. Libraries and a CUDA context take about as much, on a machine that has none left.
_GROWN = GIB

TICK = 0.05  # seconds between two looks at a worker's memory, in which one core writes 0.2 GiB
_SCAN = 0.25  # seconds between two looks at its compilers, and hence of one step of the clocks


SLOW_SECONDS = 10.0  # of loading a kernel's library, before somebody wonders


@contextmanager
def says_when_slow(name: str) -> Iterator[None]:
    """That the tool waits for a kernel to load, on stderr, once it has for a while: nothing else is printed by then."""
    words = f"note: waiting for {name} to load, for {ANSWER_SECONDS:g} s at most\n"
    timer = threading.Timer(SLOW_SECONDS, sys.stderr.write, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class OverrunError(Exception):
    """The worker took more than it may: its text says of what. It has to be ended."""


class OvertimeError(OverrunError):
    """Too much time."""


class OutOfMemoryError(OverrunError):
    """Too much memory."""


# Called with who compiles, with what, and for how many seconds so far; with None when that is over.
Listener = Callable[[str, str | None, float], None]
_listeners: list[Listener] = []


@contextmanager
def compilations(listener: Listener) -> Iterator[None]:
    """Tell `listener` of compilations, from whichever thread sees them."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Watch:
    """Clocks and scales for the questions that one process is asked, one at a time, on behalf of `name`.

    timeout: seconds that one kernel call may take, without compilation.
    """

    def __init__(self, name: str = "", timeout: float = math.inf) -> None:
        self._name, self._timeout = name, timeout
        self.compiled_in_call: list[float] = []  # seconds of each kernel call in which compilers ran
        self.compiled = 0.0  # seconds altogether

    def begin(self, pid: int) -> None:
        """The process is asked now."""
        self._pid = pid
        self._rss = memory.resident(pid)
        self._in_call = False
        self._charged = self._last_scan = time.monotonic()
        self._answering = self._calling = self._compiling = 0.0
        self._compiler: str | None = None

    def call_begins(self) -> None:
        """The process is about to call a kernel."""
        self._charge()
        self._in_call, self._calling = True, 0.0
        self.compiled_in_call.append(0.0)

    def call_ends(self) -> None:
        """The kernel has returned."""
        self._charge()
        self._in_call = False

    def end(self) -> None:
        """The process has answered, or will not."""
        self._charge()
        self._tell(None)

    def check(self) -> None:
        """Look at the process. Raises OvertimeError or OutOfMemoryError when it has to be ended."""
        self._check_memory()
        if time.monotonic() - self._last_scan < _SCAN:
            return
        # Since the last look it did what it does now: so short calls cost no look, and a build counts from its start.
        self._tell(compiler_below(self._pid))
        self._charge()
        self._last_scan = time.monotonic()
        if self._compiling > COMPILING_SECONDS:
            raise OvertimeError(f"still compiling ({self._compiler}) after {COMPILING_SECONDS:g} s")
        if self._compiler is None and self._calling > self._timeout:
            raise OvertimeError(f"no result after {self._timeout:g} s (--timeout)")
        if self._answering > ANSWER_SECONDS:
            raise OvertimeError(f"no answer after {ANSWER_SECONDS:g} s, besides the kernel call")

    def _charge(self) -> None:
        now = time.monotonic()
        passed, self._charged = now - self._charged, now
        if self._compiler is not None:
            self._compiling += passed
            self.compiled += passed
            if self._in_call:
                self.compiled_in_call[-1] += passed
        elif self._in_call:
            self._calling += passed
        else:
            self._answering += passed

    def _tell(self, compiler: str | None) -> None:
        if compiler is not None or self._compiler is not None:
            for listener in tuple(_listeners):
                listener(self._name, compiler, self._compiling)
        self._compiler = compiler

    def _check_memory(self) -> None:
        size = memory.resident(self._pid)
        if size - self._rss < _GROWN:
            return
        left = memory.available()
        if left < min(_RESERVE, memory.total() * _RESERVE_PART):
            raise OutOfMemoryError(
                f"out of memory: the process grew to {size / GIB:.1f} GiB and the machine has {left / GIB:.1f} GiB left"
            )
