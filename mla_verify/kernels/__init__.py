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

# name -> "module:class", or a function that makes one. Neither takes arguments.
KERNELS: dict[str, str] = {
    "torch-absorbed": "mla_verify.kernels.torch_sdpa:TorchAbsorbed",
    "torch-mha": "mla_verify.kernels.torch_sdpa:TorchMHA",
    "torch-concat": "mla_verify.kernels.torch_concat:TorchConcat",
    "torch-layer-absorbed": "mla_verify.kernels.layers:torch_layer_absorbed",
    "torch-layer-expanded": "mla_verify.kernels.layers:torch_layer_expanded",
    "triton-decode": "mla_verify.kernels.triton_mla:TritonDecode",
    "triton-prefill": "mla_verify.kernels.triton_mla:TritonPrefill",
    "triton-cache-write": "mla_verify.kernels.triton_mla:TritonCacheWrite",
    "triton-write-decode": "mla_verify.kernels.triton_mla:TritonWriteDecode",
    "flashinfer-mla-fa2": "mla_verify.kernels.flashinfer:FlashInferMLAFA2",
    "flashinfer-mla-fa3": "mla_verify.kernels.flashinfer:FlashInferMLAFA3",
    "flashinfer-mla-fa2-tokens": "mla_verify.kernels.flashinfer:FlashInferMLATokensFA2",
    "flashinfer-mla-fa3-tokens": "mla_verify.kernels.flashinfer:FlashInferMLATokensFA3",
    "flashinfer-ragged-fa2": "mla_verify.kernels.flashinfer:FlashInferRaggedFA2",
    "flashinfer-ragged-fa3": "mla_verify.kernels.flashinfer:FlashInferRaggedFA3",
    "flashinfer-append": "mla_verify.kernels.flashinfer:FlashInferAppend",
    "flashinfer-concat": "mla_verify.kernels.flashinfer:FlashInferConcat",
    "sglang-decode": "mla_verify.kernels.sglang:SGLangDecode",
    "sglang-extend": "mla_verify.kernels.sglang:SGLangExtend",
    "sglang-extend-mha": "mla_verify.kernels.sglang:SGLangExtendMHA",
    "sglang-set-mla-kv-buffer": "mla_verify.kernels.sglang:SGLangSetMLAKVBuffer",
    "sglang-write-decode": "mla_verify.kernels.sglang:SGLangWriteDecode",
    "sglang-set-mla-kv-buffer-tma": "mla_verify.kernels.sglang_jit:SGLangSetMLAKVBufferTMA",
    "sglang-concat-k": "mla_verify.kernels.sglang_jit:SGLangConcatK",
    "sglang-concat-absorb-q": "mla_verify.kernels.sglang_jit:SGLangConcatAbsorbQ",
    "flashinfer-layer-absorbed": "mla_verify.kernels.layers:flashinfer_layer_absorbed",
    "flashinfer-layer-expanded": "mla_verify.kernels.layers:flashinfer_layer_expanded",
    "sglang-layer-decode": "mla_verify.kernels.layers:sglang_layer_decode",
    "sglang-layer-absorbed": "mla_verify.kernels.layers:sglang_layer_absorbed",
    "sglang-layer-expanded": "mla_verify.kernels.layers:sglang_layer_expanded",
    "sgl-merge": "mla_verify.kernels.merges:SglMerge",
    "sglang-merge": "mla_verify.kernels.merges:SGLangMerge",
    "flashinfer-merge": "mla_verify.kernels.merges:FlashInferMerge",
    "sglang-flashinfer-merge": "mla_verify.kernels.sglang_chunked:SGLangFlashInferMerge",
    "sglang-cutlass-mla": "mla_verify.kernels.other_gpus:SGLangCutlassMLA",
    "flashinfer-mla-cutlass": "mla_verify.kernels.other_gpus:FlashInferMLACutlass",
    "flashinfer-mla-trtllm-gen": "mla_verify.kernels.other_gpus:FlashInferMLATrtllmGen",
    "flashinfer-mla-cute-dsl": "mla_verify.kernels.other_gpus:FlashInferMLACuteDSL",
    "flashinfer-mla-xqa": "mla_verify.kernels.other_gpus:FlashInferMLAXQA",
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
