"""The kernels under test, in one visible table. Nothing is imported until a kernel is asked for."""

from __future__ import annotations

import importlib

from mla_verify.errors import UsageError, did_you_mean
from mla_verify.kernels.contract import Kernel

# name -> "module:class". A class takes no arguments.
KERNELS: dict[str, str] = {
    "torch-absorbed": "mla_verify.kernels.torch_sdpa:TorchAbsorbed",
    "torch-mha": "mla_verify.kernels.torch_sdpa:TorchMHA",
}


def kernel_names() -> tuple[str, ...]:
    return tuple(KERNELS)


def load_kernel(name: str) -> Kernel:
    """The kernel of this name. Raises UsageError for an unknown one."""
    if name not in KERNELS:
        hint = did_you_mean(name, KERNELS, "mla-verify list kernels shows what there is")
        raise UsageError(f"unknown kernel {name!r}", hint)
    module, _, attribute = KERNELS[name].partition(":")
    kernel: Kernel = getattr(importlib.import_module(module), attribute)()
    return kernel
