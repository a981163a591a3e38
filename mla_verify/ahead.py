"""Kernels that have processes of their own run ahead of the tool: the next cases' while it judges this one's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from mla_verify.attempt import Attempt
from mla_verify.workers import close_workers

_MAX_THREADS = 8  # each has a worker, which is a process of a few hundred MB


class Ahead:
    """Runs `run(attempt)` for every attempt of that kind, in order, at most a few cases before they are asked for.

    A context manager: leaving it drops what has not been started, and ends the workers if one is still at it.
    """

    def __init__(self, cases: Sequence[Sequence[Attempt]], run: Callable[[Attempt], None], device: str) -> None:
        self._cases, self._run, self._device = cases, run, device
        # On a GPU kernels have the device for themselves, one after the other.
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS) if device == "cpu" else 1
        self._look_ahead = 2 * threads if device == "cpu" else 0
        self._executor = ThreadPoolExecutor(threads)
        self._futures: dict[int, Future[None]] = {}  # by the attempt's identity
        self._reached = 0
        self._torch_threads = 0  # to be restored

    def reach(self, index: int) -> None:
        """Start what belongs to case `index` and to the next few."""
        for attempts in self._cases[self._reached : index + self._look_ahead + 1]:
            for attempt in attempts:
                if self._runs_here(attempt):
                    self._futures[id(attempt)] = self._executor.submit(self._run, attempt)
            self._reached += 1

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
