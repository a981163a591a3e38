"""Kernels that have processes of their own run ahead of the tool: the next cases' while it judges this one's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import TracebackType
from typing import TypeVar

from mla_verify.attempt import Attempt
from mla_verify.memory import GIB, give_back_gpu_memory
from mla_verify.workers import close_idle_workers, close_workers

_MAX_THREADS = 8  # each has a worker, which is a process of a few hundred MB
# On a GPU: enough that neither side waits for the other, and little to hold.
_GPU_LOOK_AHEAD = 2
# A case with a tensor of this size has the device, and the machine, for itself: every kernel's output may be as large,
# and they stay until the case is judged.
_LARGE = GIB // 4

_T = TypeVar("_T")


class Ahead:
    """Runs `run(attempt)` for every attempt of that kind, in order, at most a few cases before they are asked for.

    A context manager: leaving it drops what has not been started, and ends the workers if one is still at it.
    """

    def __init__(self, cases: Sequence[Sequence[Attempt]], run: Callable[[Attempt], None], device: str) -> None:
        self._cases, self._run, self._device = cases, run, device
        # On a GPU kernels have the device for themselves, one after the other.
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS) if device == "cpu" else 1
        self._look_ahead = 2 * threads if device == "cpu" else _GPU_LOOK_AHEAD
        self._executor = ThreadPoolExecutor(threads)
        self._futures: dict[int, Future[None]] = {}  # by the attempt's identity
        self._reached = 0
        self._torch_threads = 0  # to be restored
        self._turn = threading.Lock()  # whose holder has the GPU for itself

    def reach(self, index: int) -> None:
        """Start what belongs to case `index` and to the next few, up to one that is large or follows a large one."""
        last = min(index + self._look_ahead, len(self._cases) - 1)
        while self._reached <= last:
            if self._reached > index and any(map(_is_large, self._cases[self._reached - 1 : self._reached + 1])):
                return
            for attempt in self._cases[self._reached]:
                if self._runs_here(attempt):
                    self._futures[id(attempt)] = self._executor.submit(self._run_in_turn, attempt)
            self._reached += 1

    def _run_in_turn(self, attempt: Attempt) -> None:
        with self._turn if self._device == "cuda" else nullcontext():
            self._run(attempt)

    def with_room(self, make: Callable[[], _T]) -> _T:
        """What the tool's own `make()` gives. When the GPU's memory runs out, a second time with the device for itself.

        A kernel that runs ahead may have taken all of it, and is ended when it gets no more.
        """
        from mla_verify.execute import out_of_memory

        try:
            return make()
        except Exception as error:  # it holds what was allocated so far: the second time is not in here
            if self._device != "cuda" or not out_of_memory(error):
                raise
        with self._turn:
            close_idle_workers()
            give_back_gpu_memory(keep=0)
            return make()

    def _runs_here(self, attempt: Attempt) -> bool:
        return attempt.is_open and attempt.entry.kernel.own_process(self._device) is not None

    def finish(self, attempt: Attempt) -> bool:
        """Wait until the attempt has run. False if it is none that runs here. Raises what running it raised."""
        future = self._futures.get(id(attempt))
        if future is None:
            return False
        try:
            future.result()
        finally:
            if future.done():  # or else Ctrl-C came, and __exit__ ends it
                del self._futures[id(attempt)]
        return True

    def __enter__(self) -> Ahead:
        if self._device == "cpu" and any(self._runs_here(attempt) for attempts in self._cases for attempt in attempts):
            import torch

            # The workers have the cores; more threads than cores made the smoke suite a fifth slower.
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._torch_threads:
            import torch

            torch.set_num_threads(self._torch_threads)
        # A thread that was between two questions asks the next one yet.
        while any(future.running() for future in self._futures.values()):
            close_workers()
            time.sleep(0.05)


def _is_large(attempts: Sequence[Attempt]) -> bool:
    spec = attempts[0].entry.spec
    return spec is not None and (spec.layout.startswith("far") or spec.num_bytes >= _LARGE)
