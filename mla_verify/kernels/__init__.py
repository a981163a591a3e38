"""The kernels under test, in one visible table, and those of other packages. None is imported until it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from mla_verify.errors import UsageError, did_you_mean
from mla_verify.kernels.contract import Contract, Kernel, KernelBase, RoundingFacts, mla_kernel

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Contract", "Kernel", "KernelBase", "RoundingFacts", "kernel_names", "load_kernel", "mla_kernel"]

# name -> "module:class". A class takes no arguments.
KERNELS: dict[str, str] = {
    "torch-absorbed": "mla_verify.kernels.torch_sdpa:TorchAbsorbed",
    "torch-mha": "mla_verify.kernels.torch_sdpa:TorchMHA",
    "triton-decode": "mla_verify.kernels.triton_mla:TritonDecode",
    "triton-prefill": "mla_verify.kernels.triton_mla:TritonPrefill",
    "triton-cache-write": "mla_verify.kernels.triton_mla:TritonCacheWrite",
    "triton-write-decode": "mla_verify.kernels.triton_mla:TritonWriteDecode",
    "sglang-decode": "mla_verify.kernels.sglang:SGLangDecode",
    "sglang-extend": "mla_verify.kernels.sglang:SGLangExtend",
    "sglang-extend-mha": "mla_verify.kernels.sglang:SGLangExtendMHA",
    "sglang-set-mla-kv-buffer": "mla_verify.kernels.sglang:SGLangSetMLAKVBuffer",
    "sglang-write-decode": "mla_verify.kernels.sglang:SGLangWriteDecode",
}
# Where other packages register theirs: in their pyproject.toml, [project.entry-points."mla_verify.kernels"].
ENTRY_POINTS = "mla_verify.kernels"


def kernel_names() -> tuple[str, ...]:
    """Ours, then those of installed packages. Raises UsageError when two have one name."""
    return (*KERNELS, *registered_kernels())


def load_kernel(name: str, device: str = "cpu") -> Kernel:
    """The kernel of this name, or of this "path/to/file.py:function", to be run on `device`.

    Raises UsageError for an unknown name, a file that does not run, and what is no kernel.
    """
    from mla_verify.kernels.outside import is_file_kernel, load_file_kernel, load_registered_kernel

    if is_file_kernel(name):
        return load_file_kernel(name, device)
    if name in KERNELS:
        return _load_ours(name)
    registered = registered_kernels()
    if name in registered:
        return load_registered_kernel(name, registered[name].value, device)
    if ":" in name or name.endswith(".py"):
        raise UsageError(f"unknown kernel {name!r}", "your own is path/to/file.py:function")
    hint = did_you_mean(name, kernel_names(), "mla-verify list kernels shows what there is")
    raise UsageError(f"unknown kernel {name!r}", f"{hint}; your own: path/to/file.py:function")


def load_kernel_here(name: str) -> Kernel:
    """The same, for its own process, in which whatever comes from outside is imported."""
    from mla_verify.kernels.loading import load_here

    return _load_ours(name) if name in KERNELS else load_here(name)


def _load_ours(name: str) -> Kernel:
    module, _, attribute = KERNELS[name].partition(":")
    kernel: Kernel = getattr(importlib.import_module(module), attribute)()
    return kernel


@lru_cache
def registered_kernels() -> Mapping[str, EntryPoint]:
    """Entry points of other packages, by name. Raises UsageError when two have one name."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = "mla-verify itself" if point.name in KERNELS else ""
        if point.name in found and found[point.name] != point:
            other = _whose(found[point.name])
        if other:
            raise UsageError(
                f"two kernels of one name: {point.name!r} is of {_whose(point)} and also of {other}",
                f"rename one in its package's entry points, group {ENTRY_POINTS}, or uninstall a package",
            )
        found[point.name] = point
    return found


def _whose(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else 'an unknown package'} ({point.value})"
