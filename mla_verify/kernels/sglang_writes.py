"""SGLang's cache write: several kernels behind the one name `set_mla_kv_buffer_triton`, and which of them ran."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mla_verify.kernels.sglang_api import JIT_WRITE, WRITE

if TYPE_CHECKING:
    from torch import Tensor

TRITON, JIT = "its Triton kernel", "its JIT CUDA kernel"


def fits_jit(part_bytes: tuple[int, int]) -> bool:
    """Whether the JIT kernel takes rows of these two parts.

    0.5.16 stores rows in units of 16 bytes, from parts that it reads in units of 4 (jit_kernel/set_mla_kv_buffer.py:52,
    60); 0.5.23 asks for the 16 alone.
    """
    return sum(part_bytes) % 16 == 0 and all(size % 4 == 0 for size in part_bytes)


def takes_jit(num_slots: int, part_bytes: tuple[int, int]) -> bool:
    """Whether `set_mla_kv_buffer_triton` goes to its JIT kernel for a write of this size, by its own rule.

    On SM 9.0 and later: 0.5.16 from a number of slots on, 768 (mla_buffer.py:87, 127-133), 0.5.23 always (:230-236).
    """
    module = importlib.import_module(WRITE.module)
    least: int = getattr(module, "_TMA_BULK_STORE_MIN_LOCS", 1)
    return num_slots >= least and bool(module.is_arch_support_pdl()) and fits_jit(part_bytes)


def write(kv_buffer: Tensor, slots: Tensor, ckv: Tensor, kpe: Tensor) -> str:
    """Row t of ckv [T, R] and kpe [T, P] into row slots[t] of kv_buffer [S, 1, R + P]. Returns which kernel did it."""
    watched = [(importlib.import_module(WRITE.module), "set_mla_kv_buffer_kernel", TRITON)]
    watched.append((JIT_WRITE.home(), JIT_WRITE.name, JIT))
    with _platform_with_triton(kv_buffer.device.type), launches(watched) as launched:
        _call(WRITE.load(), kv_buffer, slots, ckv, kpe)
    return " and ".join(dict.fromkeys(launched)) or "neither its Triton nor its JIT kernel"


def write_directly(kv_buffer: Tensor, slots: Tensor, ckv: Tensor, kpe: Tensor) -> None:
    """The same with the JIT kernel, whatever the size."""
    _call(JIT_WRITE.load(), kv_buffer, slots, ckv, kpe)


def _call(function: Any, kv_buffer: Tensor, slots: Tensor, ckv: Tensor, kpe: Tensor) -> None:
    options = {}
    if "reserved_skip_index" in inspect.signature(function).parameters:
        options["reserved_skip_index"] = -1  # 0.5.23 leaves slot 0 out unless told not to; our slots start at 0
    function(kv_buffer=kv_buffer, loc=slots, cache_k_nope=ckv, cache_k_rope=kpe, **options)


@contextmanager
def _platform_with_triton(device: str) -> Iterator[None]:
    """On a CPU 0.5.23 writes with torch, since its platform denies Triton; the interpreter can run the kernel."""
    platforms = importlib.import_module("sglang.srt.platforms")
    platform: Any = getattr(platforms, "current_platform", None)
    capabilities: Any = getattr(platform, "capabilities", None)
    if device != "cpu" or platform is None or not hasattr(capabilities, "supports_triton"):
        yield
        return
    platform.capabilities = type(capabilities)(supports_triton=True)
    try:
        yield
    finally:
        platform.capabilities = capabilities


@contextmanager
def launches(watched: list[tuple[Any, str, str]]) -> Iterator[list[str]]:
    """What is launched of (module, name, what it is called): Triton kernels `name[grid](..)` and functions `name(..)`.

    A module without that name cannot launch it.
    """
    launched: list[str] = []
    before = [(module, name, getattr(module, name, None), what) for module, name, what in watched]
    here = [(module, name, kernel, what) for module, name, kernel, what in before if kernel is not None]
    for module, name, kernel, what in here:
        setattr(module, name, _Noted(kernel, launched, what))
    try:
        yield launched
    finally:
        for module, name, kernel, _ in here:
            setattr(module, name, kernel)


class _Noted:
    """A kernel whose launches are noted."""

    def __init__(self, kernel: Any, launched: list[str], what: str) -> None:
        self._kernel, self._launched, self._what = kernel, launched, what

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        self._launched.append(self._what)
        launch: Callable[..., Any] = self._kernel[grid]
        return launch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._launched.append(self._what)
        return self._kernel(*args, **kwargs)
