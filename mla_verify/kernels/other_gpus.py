"""MLA kernels for GPUs that mla-verify has not run on: listed by name with what they need, never silently missing.

There is nothing behind these names. On the GPU that one needs, the answer is that mla-verify has no adapter for it.
Line numbers are of FlashInfer 0.6.14 and SGLang 0.5.16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mla_verify.kernels.contract import Contract, KernelBase
from mla_verify.kernels.entry import version
from mla_verify.kernels.gpu import capability, this_gpu

if TYPE_CHECKING:
    from mla_verify.tensors import MLAInputs, MLAOutput

_B200 = "an SM100 GPU (B200)"


class NeedsOtherGPU(KernelBase):
    """A name, and why there is no more to it here."""

    name: ClassVar[str]
    library: ClassVar[str]  # the distribution's name
    api: ClassVar[str]
    gpu: ClassVar[str]  # in words
    capabilities: ClassVar[tuple[str, ...]]  # compute capabilities that it is built for
    source: ClassVar[str]  # of that fact
    # Of which cases it would be.
    contract = Contract(form="absorbed", dtypes=("bf16",), phases=("decode",))

    def why_unavailable(self, device: str) -> str:
        if device == "cpu":
            return f"needs {self.gpu}; this run is on the CPU"
        major, minor = capability()
        if f"{major}.{minor}" in self.capabilities:
            return f"mla-verify has no adapter for it yet ({this_gpu()})"
        return f"needs {self.gpu}; {this_gpu()}"

    def version(self) -> str:
        return version(self.library)

    def run(self, inputs: MLAInputs, out: MLAOutput) -> MLAOutput:
        raise NotImplementedError(self.why_unavailable(inputs.device.type))

    def words(self) -> dict[str, str]:
        """For lists: what it is, and which GPUs it is for."""
        return {"API": f"{self.api}, {self.library}", "GPUs": f"SM {', '.join(self.capabilities)}: {self.source}"}


class FlashInferMLACutlass(NeedsOtherGPU):
    name = "flashinfer-mla-cutlass"
    library = "flashinfer-python"
    api = 'flashinfer.mla.BatchMLAPagedAttentionWrapper(backend="cutlass")'
    gpu = _B200
    capabilities = ("10.0", "10.3", "11.0")
    source = "flashinfer/jit/mla.py:23 builds it for SM 10 and 11"


class FlashInferMLATrtllmGen(NeedsOtherGPU):
    name = "flashinfer-mla-trtllm-gen"
    library = "flashinfer-python"
    api = 'flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(backend="trtllm-gen")'
    gpu = _B200
    capabilities = ("10.0", "10.3")
    source = "flashinfer/mla/_core.py:2756 takes it on SM 10 alone"


class FlashInferMLACuteDSL(NeedsOtherGPU):
    name = "flashinfer-mla-cute-dsl"
    library = "flashinfer-python"
    api = 'flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(backend="cute-dsl")'
    gpu = _B200
    capabilities = ("10.0", "10.3")
    source = "flashinfer/mla/_core.py:2093 refuses what is older; cute_dsl/attention/wrappers/batch_mla.py:702"


class FlashInferMLAXQA(NeedsOtherGPU):
    name = "flashinfer-mla-xqa"
    library = "flashinfer-python"
    api = "flashinfer.mla.xqa_batch_decode_with_kv_cache_mla"
    gpu = "an SM120 GPU (RTX PRO 6000 Blackwell)"
    capabilities = ("12.0", "12.1")
    source = "flashinfer/mla/_core.py:2767"


class SGLangCutlassMLA(NeedsOtherGPU):
    name = "sglang-cutlass-mla"
    library = "sglang-kernel"
    api = "sgl_kernel.cutlass_mla_decode"
    gpu = _B200
    capabilities = ("10.0",)
    source = "sgl-kernel/csrc/attention/cutlass_mla_kernel.cu instantiates CUTLASS's kernel for SM100"
