"""Kernels from outside, seen from the tool: they are loaded and run in a process of their own, never in this one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mla_verify.errors import UsageError
from mla_verify.kernels.contract import Contract, Kernel, KernelBase
from mla_verify.kernels.interpreter import ENVIRONMENT
from mla_verify.watch import says_when_slow
from mla_verify.workers import WorkerDiedError, ask


@dataclass(frozen=True)
class Description:
    """What a kernel's process says of it."""

    contract: Contract  # its facts as a FactsTable
    version: str
    missing: str | None
    environment: Mapping[str, str] | None  # that it asks for itself
    has_contract: bool = True  # False: the default one, which nobody wrote


class OutsideKernel(KernelBase):
    """Stands for it here; calls.py has everything else answered in its process."""

    def __init__(self, name: str, described: Description, environment: Mapping[str, str]) -> None:
        self.name = name
        self.contract = described.contract
        self.has_contract = described.has_contract
        self._described = described
        self._environment = environment

    def missing(self) -> str | None:
        return self._described.missing

    def own_process(self, device: str) -> Mapping[str, str]:
        # What one file's kernels leave behind in their process must not reach another's.
        return {**self._environment, **(self._described.environment or {})}

    def version(self) -> str:
        return self._described.version

    def run(self, inputs: object, out: object) -> object:
        raise AssertionError(f"{self.name} was called in the tool's own process")


def is_file_kernel(name: str) -> bool:
    """Whether a kernel's name is "path/to/file.py:function"."""
    path, colon, function = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and bool(function)


def load_file_kernel(name: str, device: str) -> Kernel:
    """The kernel of "path/to/file.py:function". Raises UsageError when that is none."""
    path = Path(name.rpartition(":")[0])
    if not path.is_file():
        raise UsageError(f"--kernel {name}: there is no file {path}", "give path/to/file.py:function")
    # A file that was changed is another file.
    return _load(name, f"{path.resolve()} {hashlib.sha256(path.read_bytes()).hexdigest()}", device)


def load_registered_kernel(name: str, value: str, device: str) -> Kernel:
    """The kernel of an entry point. Raises UsageError when that is none."""
    return _load(name, value, device)


@lru_cache
def _load(name: str, source: str, device: str) -> Kernel:
    from mla_verify.kernels.loading import describe

    environment = {**(ENVIRONMENT if device == "cpu" else {}), "MLA_VERIFY_KERNELS_OF": source}
    try:
        with says_when_slow(name):
            described = ask(environment, describe, name, device)
    except WorkerDiedError as death:
        last = f"; it wrote last: {death.log.strip().splitlines()[-1]}" if death.log.strip() else ""
        raise UsageError(
            f"kernel {name}: importing it ended its process, {death.how}{last}",
            "it must import without running the kernel: try python -c 'import ...'",
        ) from None
    return OutsideKernel(name, described, environment)  # type: ignore[return-value]
