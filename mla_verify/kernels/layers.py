"""The whole of attention between its weights, around real kernels: absorbed over a paged kernel, or expanded.

    absorbed   q_nope w_kc -> a kernel on the latent cache -> w_vc, as engines decode
    expanded   keys and values of every head from the cached latent -> a ragged 192/128 kernel, as engines prefill

One set of weights gives both; each is held against the float64 layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_verify.kernels.contract import Contract, Kernel, KernelBase, RoundingFacts

if TYPE_CHECKING:
    from torch import Tensor

    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import AbsorbedInputs, LayerInputs, MHAInputs, MLAOutput

# In fp32 nothing is stored on the way that is not held whole, and the other forms say all there is to say.
_DTYPES = ("fp16", "bf16")
_SOURCES = (
    "mla_verify/kernels/layers.py, product: torch.bmm in the case's dtype sums in fp32 and rounds once; where cuBLAS "
    "may add partial sums in 16 bits instead, allow_*_reduced_precision_reduction is set to False",
)


class _Layer(KernelBase, ABC):
    """Whether it runs, and on what, is the inner kernel's to say."""

    way: str

    def __init__(self, name: str, inner: Any) -> None:
        self.name = name
        self.inner: Kernel = inner
        self.contract = self._contract()

    def _contract(self) -> Contract:
        theirs = self.inner.contract
        return Contract(
            form="layer",
            dtypes=tuple(dtype for dtype in theirs.dtypes if dtype in _DTYPES),
            phases=theirs.phases,
            facts=self._facts,
            returns_lse=theirs.returns_lse,
            lse_base=theirs.lse_base,
            lse_layout=theirs.lse_layout,
            empty_out=theirs.empty_out,
            empty_lse=theirs.empty_lse,
            num_heads=theirs.num_heads,
        )

    @abstractmethod
    def _facts(self, dtype: str) -> RoundingFacts:
        """The inner kernel's, and what the layer adds."""

    @abstractmethod
    def _inner_case(self, spec: CaseSpec) -> CaseSpec:
        """What the inner kernel is asked about."""

    def missing(self) -> str | None:
        return self.inner.missing()

    def own_process(self, device: str) -> Mapping[str, str] | None:
        return self.inner.own_process(device)

    def why_unavailable(self, device: str) -> str | None:
        return self.inner.why_unavailable(device)

    def why_not_dtype(self, dtype: str, device: str) -> str | None:
        return self.inner.why_not_dtype(dtype, device)

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        case = self._inner_case(spec)
        return self.inner.contract.why_not(case) or self.inner.why_not(case, device)

    def version(self) -> str:
        return self.inner.version()

    def ran(self) -> str:
        return f"{self.inner.ran()}, {self.way}"


class AbsorbedLayer(_Layer):
    """inner: of form absorbed. It gets the query as the product leaves it, [H, T, R] in memory."""

    way = "weights absorbed by torch.bmm"

    def _contract(self) -> Contract:
        theirs = self.inner.contract
        return replace(super()._contract(), page_sizes=theirs.page_sizes, finite_tail=theirs.finite_tail)

    def _facts(self, dtype: str) -> RoundingFacts:
        inner = self.inner.contract.facts(dtype)
        return replace(inner, layer="absorbed", layer_tensor_core_k=16, sources=(*inner.sources, *_SOURCES))

    def _inner_case(self, spec: CaseSpec) -> CaseSpec:
        return replace(spec, form="absorbed")

    def run(self, inputs: LayerInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.tensors import MLAOutput, output_buffers

        absorbed = self.absorb(inputs)
        latent = output_buffers(absorbed, inputs.q_nope.dtype).output.out
        done = self.inner.run(absorbed, MLAOutput(latent, out.lse))
        out.out.copy_(product(done.out.transpose(0, 1), inputs.w_vc).transpose(0, 1))
        return MLAOutput(out.out, done.lse)

    def absorb(self, inputs: LayerInputs) -> AbsorbedInputs:
        from mla_verify.tensors import AbsorbedInputs

        q_latent = product(inputs.q_nope.transpose(0, 1), inputs.w_kc).transpose(0, 1)
        return AbsorbedInputs(
            qo_indptr=inputs.qo_indptr,
            kv_lens=inputs.kv_lens,
            sm_scale=inputs.sm_scale,
            causal=inputs.causal,
            q_nope=q_latent.contiguous() if self.inner.contract.strides == "contiguous" else q_latent,
            q_pe=inputs.q_pe,
            ckv_cache=inputs.ckv_cache,
            kpe_cache=inputs.kpe_cache,
            page_table=inputs.page_table,
        )


class ExpandedLayer(_Layer):
    """inner: of form mha. Values are views of what kv_b_proj gives; keys are concatenated, as nowhere else."""

    way = "latent expanded by torch.bmm"

    def _facts(self, dtype: str) -> RoundingFacts:
        inner = self.inner.contract.facts(dtype)
        return replace(inner, layer="expanded", layer_tensor_core_k=16, sources=(*inner.sources, *_SOURCES))

    def _inner_case(self, spec: CaseSpec) -> CaseSpec:
        return replace(spec, form="mha", page_size=0)

    def run(self, inputs: LayerInputs, out: MLAOutput) -> MLAOutput:
        return self.inner.run(self.expand(inputs), out)

    def expand(self, inputs: LayerInputs) -> MHAInputs:
        import torch

        from mla_verify.inputs import indptr, slots_of
        from mla_verify.tensors import MHAInputs

        lens, page_size = inputs.kv_lens.tolist(), inputs.ckv_cache.shape[1]
        slots = torch.cat([slots_of(inputs.page_table, b, page_size, n) for b, n in enumerate(lens)])
        ckv, kpe = inputs.ckv_cache.flatten(0, 1)[slots], inputs.kpe_cache.flatten(0, 1)[slots]
        num_heads, nope, _ = inputs.w_kc.shape
        kv_b_proj = torch.cat([inputs.w_kc, inputs.w_vc.transpose(1, 2)], dim=1).flatten(0, 1)  # [H (N + V), R]
        k_nope, v = product(ckv[None], kv_b_proj.T[None])[0].unflatten(1, (num_heads, -1)).tensor_split([nope], dim=-1)
        return MHAInputs(
            qo_indptr=inputs.qo_indptr,
            kv_lens=inputs.kv_lens,
            sm_scale=inputs.sm_scale,
            causal=inputs.causal,
            q=torch.cat([inputs.q_nope, inputs.q_pe], dim=-1),
            k=torch.cat([k_nope, kpe[:, None].expand(-1, num_heads, -1)], dim=-1),
            v=v.contiguous() if self.inner.contract.strides == "contiguous" else v,
            kv_indptr=indptr(lens).to(inputs.device),
            qk_rope_head_dim=kpe.shape[-1],
        )


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, [H, M, K] by [H, K, N], in their dtype: fp32 sums, each rounded once."""
    import torch

    if a.device.type == "cpu":
        # The same, and a hundred times as fast as a CPU's own products in fp16.
        return torch.bmm(a.float(), b.float()).to(a.dtype)
    with _reductions_in_fp32():
        return torch.bmm(a, b)


_REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@contextmanager
def _reductions_in_fp32() -> Iterator[None]:
    """No partial sums in 16 bits, which torch allows cuBLAS by default; the settings are put back afterwards."""
    import torch

    settings = torch.backends.cuda.matmul
    before = {}
    for name in _REDUCTIONS:
        # Later versions keep a second flag, whether split-K is allowed at all, which the setter would reset.
        split_k = getattr(settings, f"{name}_split_k", None)
        allowed = getattr(settings, name)
        before[name] = allowed if split_k is None else (allowed, split_k)
    try:
        for name, value in before.items():
            setattr(settings, name, (False, value[1]) if isinstance(value, tuple) else False)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def torch_layer_absorbed() -> AbsorbedLayer:
    from mla_verify.kernels.torch_sdpa import TorchAbsorbed

    return AbsorbedLayer("torch-layer-absorbed", TorchAbsorbed())


def torch_layer_expanded() -> ExpandedLayer:
    from mla_verify.kernels.torch_sdpa import TorchMHA

    return ExpandedLayer("torch-layer-expanded", TorchMHA())


def flashinfer_layer_absorbed() -> AbsorbedLayer:
    from mla_verify.kernels.flashinfer import FlashInferMLAFA3

    return AbsorbedLayer("flashinfer-layer-absorbed", FlashInferMLAFA3())


def flashinfer_layer_expanded() -> ExpandedLayer:
    from mla_verify.kernels.flashinfer import FlashInferRaggedFA3

    return ExpandedLayer("flashinfer-layer-expanded", FlashInferRaggedFA3())


def sglang_layer_decode() -> AbsorbedLayer:
    """Of phase decode alone: SGLang takes another kernel there, which rounds otherwise."""
    from mla_verify.kernels.sglang import SGLangDecode

    return AbsorbedLayer("sglang-layer-decode", SGLangDecode())


def sglang_layer_absorbed() -> AbsorbedLayer:
    from mla_verify.kernels.sglang import SGLangExtend

    return AbsorbedLayer("sglang-layer-absorbed", SGLangExtend())


def sglang_layer_expanded() -> ExpandedLayer:
    from mla_verify.kernels.sglang import SGLangExtendMHA

    return ExpandedLayer("sglang-layer-expanded", SGLangExtendMHA())
