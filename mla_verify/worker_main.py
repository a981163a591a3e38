"""The inside of a worker: it answers questions until its other end is closed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from mla_verify.wire import Channel, pickled

CALL_BEGINS, CALL_ENDS, ANSWER = "call begins", "call ends", "answer"  # what a worker sends
STACK_SIGNAL = signal.SIGUSR1  # upon which it writes where it is

_KNOWN = {"builtins", "torch", "mla_verify"}
_channel: Channel | None = None  # to the tool; None in the tool's own process
_retires = False


def retire() -> None:
    """Called in a worker: this answer is its last. What it did may have left it in no state for another question."""
    global _retires
    _retires = True


@contextlib.contextmanager
def kernel_call() -> Iterator[None]:
    """What is done inside is a kernel's, and counts against its time limit. Nothing where no worker is."""
    if _channel is None:
        yield
        return
    _channel.send((CALL_BEGINS,))
    try:
        yield
    finally:
        _channel.send((CALL_ENDS,))


def main() -> None:
    """The worker: argv[1] is its end of the connection."""
    global _channel
    faulthandler.enable(all_threads=False)  # the one that crashed
    # The signal may reach a thread of a library's, which has no Python stack of its own.
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    # Should the system run out of memory, it is the kernel that goes, and neither the tool nor anybody else's process.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    while not _retires:
        try:
            question = _channel.receive()
        except EOFError:
            return
        try:
            function, args = pickle.loads(question)  # here, so that one whose module does not import is an answer
            raised, answer = False, function(*args)
        except Exception as error:
            raised, answer = True, _sendable(error)
        sys.stdout.flush()
        sys.stderr.flush()
        _channel.send((ANSWER, raised, answer, _retires))


def _end_with(parent: int) -> None:
    """End when the tool is gone, whatever a kernel is still at. (An exit signal of Linux would go by the thread.)"""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _sendable(error: Exception) -> Any:
    """The exception, or its words: one with arguments of its own may well pickle, and not come back."""
    try:
        # Of the kernel's own file or library the tool has no class, and must not import one.
        if all(cls.__module__.partition(".")[0] in _KNOWN for cls in (type(error), *map(type, error.args))):
            text, buffers = pickled(error)
            pickle.loads(text, buffers=buffers)
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
