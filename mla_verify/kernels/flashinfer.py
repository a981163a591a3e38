"""FlashInfer's MLA kernels: paged attention over the latent cache, ragged attention, cache write, key concatenation.

On a CUDA GPU alone; FlashInfer compiles each kernel for each dtype when it is first planned.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from mla_verify.kernels.contract import Contract, KernelBase
from mla_verify.kernels.entry import Entry, version
from mla_verify.kernels.flashinfer_api import (
    APPEND,
    CONCAT,
    LIBRARY,
    MLA_INIT,
    MLA_PLAN,
    MLA_RUN,
    RAGGED_INIT,
    RAGGED_PLAN,
    RAGGED_RUN,
    mla_fa2_facts,
    mla_fa3_facts,
    ragged_fa2_facts,
    ragged_fa3_facts,
)
from mla_verify.kernels.flashinfer_calls import (
    append,
    attend,
    attend_ragged,
    concatenate,
    keys_by_page,
    keys_by_token,
)
from mla_verify.kernels.gpu import capability, this_gpu

if TYPE_CHECKING:
    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import AbsorbedInputs, ConcatInputs, MHAInputs, MLAOutput, WriteInputs

_DTYPES = ("fp16", "bf16")


class _FlashInfer(KernelBase):
    entries: tuple[Entry, ...]
    backend: Literal["fa2", "fa3"] = "fa2"
    # Of a case's dims, those that the kernels are built for.
    built_for: tuple[tuple[str, int], ...]
    _what = "nothing: no request has a query"  # the last run

    def missing(self) -> str | None:
        if find_spec("flashinfer") is None:
            return "flashinfer is not installed: pip install 'mla-verify[gpu]', for a machine with a CUDA GPU"
        return None

    def why_unavailable(self, device: str) -> str | None:
        if device != "cuda":
            return "FlashInfer's kernels run on a CUDA GPU; this run is on the CPU"
        return _why_no_gpu(self.backend) or next((why for e in self.entries if (why := e.why_unusable())), None)

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        wrong = [f"{name} {is_}" for name, n in self.built_for if (is_ := getattr(spec.dims, name)) != n]
        if not wrong:
            return None
        return f"{', '.join(wrong)}: it is built for {', '.join(f'{name} {n}' for name, n in self.built_for)}"

    def version(self) -> str:
        return version(LIBRARY)

    def ran(self) -> str:
        return self._what


def _why_no_gpu(backend: str) -> str | None:
    """Why this process's GPU cannot run kernels of a backend, or None."""
    if backend == "fa3" and capability() != (9, 0):
        return f"FlashInfer's fa3 kernels need a Hopper GPU, SM 9.0; {this_gpu()}"
    if capability() < (8, 0):
        return f"FlashInfer's kernels need SM 8.0 or a later GPU; {this_gpu()}"
    return None


class FlashInferMLAFA2(_FlashInfer):
    """Cat-free: queries and cache are handed over in two parts, wherever they lie."""

    name = "flashinfer-mla-fa2"
    entries = (MLA_INIT, MLA_PLAN, MLA_RUN)
    built_for = (("kv_lora_rank", 512), ("qk_rope_head_dim", 64))
    contract = Contract(form="absorbed", dtypes=_DTYPES, facts=mla_fa2_facts, returns_lse=True, lse_base="2")

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
        if len(inputs.q_nope):
            keys = keys_by_page(inputs, inputs.ckv_cache.shape[1])
            caches = inputs.ckv_cache, inputs.kpe_cache
            self._what = attend(self.backend, inputs, keys, caches, out, causal=inputs.causal)
        return out


class FlashInferMLAFA3(FlashInferMLAFA2):
    name = "flashinfer-mla-fa3"
    backend = "fa3"
    contract = Contract(form="absorbed", dtypes=_DTYPES, facts=mla_fa3_facts, returns_lse=True, lse_base="2")


class FlashInferMLATokensFA2(FlashInferMLAFA2):
    """Fed as SGLang's flashinfer_mla_backend.py feeds it: pages of one token, and both caches slices of one pool."""

    name = "flashinfer-mla-fa2-tokens"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.kernels.sglang_calls import as_pool

        if len(inputs.q_nope):
            pool, how = as_pool(inputs.ckv_cache, inputs.kpe_cache)
            caches = pool.split([inputs.v_dim, inputs.qk_dims[1]], dim=-1)
            # A batch of one query each is decode, which SGLang plans without a mask: the last query sees every key.
            causal = inputs.causal and len(inputs.q_nope) > int((inputs.qo_indptr.diff() == 1).sum())
            what = attend(self.backend, inputs, keys_by_token(inputs), caches, out, causal=causal)
            self._what = f"{what}; pages of one token; pool {how}"
        return out


class FlashInferMLATokensFA3(FlashInferMLATokensFA2):
    name = "flashinfer-mla-fa3-tokens"
    backend = "fa3"
    contract = FlashInferMLAFA3.contract


class FlashInferRaggedFA2(_FlashInfer):
    name = "flashinfer-ragged-fa2"
    entries: tuple[Entry, ...] = (RAGGED_INIT, RAGGED_PLAN, RAGGED_RUN)
    built_for = (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128))
    # A row without keys has out 0, and as its LSE the finite number that stands for -inf there (-5e4, math.cuh:33) plus
    # what masked keys add up to (prefill.cuh:2592): merges give it no weight.
    contract = Contract(
        form="mha", dtypes=_DTYPES, facts=ragged_fa2_facts, returns_lse=True, lse_base="2", empty_lse="low"
    )

    def run(self, inputs: MHAInputs, out: MLAOutput) -> MLAOutput:
        if len(inputs.q):
            self._what = attend_ragged(self.backend, inputs, out, causal=inputs.causal)
        return out


class FlashInferRaggedFA3(FlashInferRaggedFA2):
    name = "flashinfer-ragged-fa3"
    backend = "fa3"
    # Where no row of a block has keys, out is 0 and the LSE -5e4 (hopper/epilogue.cuh:250). Beside rows that have some,
    # all masked scores are equal (attention_updater.cuh:137, 230): out is a mean of values, and the LSE that of -5e4
    # times the scale, about -7,300 in base 2 for a scale of 0.1.
    contract = Contract(
        form="mha",
        dtypes=_DTYPES,
        facts=ragged_fa3_facts,
        returns_lse=True,
        lse_base="2",
        empty_out="any",
        empty_lse="low",
    )


class FlashInferAppend(_FlashInfer):
    """The write into the paged latent cache. It takes requests and positions, and finds the slots itself."""

    name = "flashinfer-append"
    entries = (APPEND,)
    built_for = FlashInferMLAFA2.built_for
    contract = Contract(form="write", dtypes=_DTYPES, skips_out_of_range=False)
    _what = "nothing: there is no new token"

    def run(self, inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.tensors import MLAOutput

        if len(inputs.slots):
            self._what = append(inputs, out.out)
        return MLAOutput(out.out, None)


class FlashInferConcat(_FlashInfer):
    """Nope and rope part of the keys of 128 heads, side by side in place."""

    name = "flashinfer-concat"
    entries = (CONCAT,)
    built_for = FlashInferRaggedFA2.built_for[:2]
    contract = Contract(form="concat", dtypes=_DTYPES, phases=("keys",), num_heads=(128,))
    _what = "nothing: there is no token"

    def run(self, inputs: ConcatInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.tensors import MLAOutput

        if len(inputs.nope):
            self._what = concatenate(inputs, out.out)
        return MLAOutput(out.out, None)
