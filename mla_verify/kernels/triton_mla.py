"""Our own Triton kernels, the worked example of kernels under test: natively on a GPU, interpreted on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_verify.kernels.contract import Contract, RoundingFacts
from mla_verify.kernels.interpreter import TritonKernel

if TYPE_CHECKING:
    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import AbsorbedInputs, MLAOutput, WriteInputs

_SOURCE = "mla_verify/kernels/triton_kernels.py"


def _facts(dtype: str, max_splits: int, *sources: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,
        rowsum="unrounded",
        partial_dtype="fp32",
        max_splits=max_splits,
        scale="product",
        # The running accumulator is an operand of P.V, and Triton adds to it what one instruction sums: 16 keys on
        # tensor cores (mma k16), one key by fp32 fused multiply-add. The interpreter sums a tile of 32 first.
        tile=None if dtype == "fp32" else 16,
        tensor_core_k=None if dtype == "fp32" else 16,  # fp32 asks for "ieee", which is no matter of tensor cores
        sources=(
            f"{_SOURCE}, _attend: p is cast to the cache's dtype before P.V, row_sum adds it up before that",
            f"{_SOURCE}, _shared_arguments: sm_scale * log2(e) is one fp32 factor of the scores",
            *sources,
        ),
    )


def _decode_facts(dtype: str) -> RoundingFacts:
    return _facts(dtype, 8, f"{_SOURCE}, launch_decode: part_out and part_lse are float32, MAX_SPLITS is 8")


def _prefill_facts(dtype: str) -> RoundingFacts:
    return _facts(dtype, 1, f"{_SOURCE}, prefill: one program sees all keys of its rows")


class _OurTriton(TritonKernel):
    _what = ""  # the last run

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        for name in ("kv_lora_rank", "qk_rope_head_dim"):
            dim = getattr(spec.dims, name)
            if dim < 16 or dim & (dim - 1):
                return f"{name} is {dim}, and a Triton block is a power of two, here of 16 or more"
        return super().why_not(spec, device)

    def version(self) -> str:
        from importlib.metadata import version

        return f"triton {version('triton')}"

    def ran(self) -> str:
        from mla_verify.kernels.triton_kernels import interpreted

        return f"{self._what}, {'interpreted' if interpreted() else 'native'}"


class TritonDecode(_OurTriton):
    name = "triton-decode"
    contract = Contract(form="absorbed", phases=("decode", "spec"), facts=_decode_facts, returns_lse=True)

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.kernels.triton_kernels import launch_decode

        num_splits = launch_decode(inputs, out)
        self._what = f"decode, {_splits(num_splits)}"
        return out


class TritonPrefill(_OurTriton):
    name = "triton-prefill"
    contract = Contract(
        form="absorbed",
        phases=("spec", "prefill", "prefix", "chunked", "mixed"),
        facts=_prefill_facts,
        returns_lse=True,
    )

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.kernels.triton_kernels import launch_prefill

        launch_prefill(inputs, out)
        self._what = "prefill"
        return out


class TritonCacheWrite(_OurTriton):
    name = "triton-cache-write"
    contract = Contract(form="write", skips_out_of_range=True)

    def why_not_dtype(self, dtype: str, device: str) -> str | None:
        return None  # a copy of bits needs neither a dot nor a cast

    def run(self, inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.kernels.triton_kernels import launch_cache_write

        launch_cache_write(inputs.ckv, inputs.kpe, inputs.slots, out.out.flatten(0, 1))
        self._what = "cache write"
        return out


# Keys of each request that triton-write-decode writes itself, as an engine writes the newest; the rest are there.
NEWEST = 16


class TritonWriteDecode(_OurTriton):
    """Cache write of the newest keys, whose slots hold NaN before, then attention over those very slots."""

    name = "triton-write-decode"
    contract = Contract(form="absorbed", phases=("decode", "spec"), facts=_decode_facts, returns_lse=True)

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
        from dataclasses import replace

        import torch

        from mla_verify.inputs import slots_of
        from mla_verify.kernels.triton_kernels import launch_cache_write, launch_decode

        num_pages, page_size, r = inputs.ckv_cache.shape
        p = inputs.kpe_cache.shape[-1]
        pool = torch.cat([inputs.ckv_cache.flatten(0, 1), inputs.kpe_cache.flatten(0, 1)], dim=-1)
        kv_lens = enumerate(inputs.kv_lens.tolist())
        newest = torch.cat([slots_of(inputs.page_table, b, page_size, kv_len)[-NEWEST:] for b, kv_len in kv_lens])
        ckv, kpe = pool[newest].split([r, p], dim=-1)
        pool[newest] = float("nan")
        launch_cache_write(ckv, kpe, newest, pool)
        ckv_cache, kpe_cache = pool.view(num_pages, page_size, r + p).split([r, p], dim=-1)
        num_splits = launch_decode(replace(inputs, ckv_cache=ckv_cache, kpe_cache=kpe_cache), out)
        self._what = f"cache write, decode, {_splits(num_splits)}"
        return out


def _splits(num_splits: int) -> str:
    return f"{num_splits} split{'' if num_splits == 1 else 's'}"
