"""Attention over a cached prefix in chunks, merged by the kernels that engines use: SGLang's two and FlashInfer's.

Each part is attended over by a kernel of the same library, in the base that the merge takes.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from mla_verify.errors import FallbackError
from mla_verify.kernels.contract import Contract
from mla_verify.kernels.flashinfer import FlashInferRaggedFA3
from mla_verify.kernels.fresh_memory import fresh_memory_is_nan
from mla_verify.kernels.merge_parts import MERGED_PHASES, MergedKernel, empty_state
from mla_verify.kernels.merges_api import (
    MERGE_FLASHINFER,
    MERGE_TRITON,
    MERGE_V2,
    flashinfer_facts,
    triton_facts,
    v2_facts,
)
from mla_verify.kernels.sglang import SGLangExtendMHA
from mla_verify.kernels.sglang_api import EXTEND
from mla_verify.kernels.sglang_calls import extend, live_requests

if TYPE_CHECKING:
    from torch import Tensor

    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import MHAInputs

_NO_PREFIX = "one part: no request has cached keys, and nothing was merged"


def _unwritten(like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Buffers of these shapes full of NaN, so that what is left unwritten shows."""
    import torch

    return torch.full_like(like[0], float("nan")), torch.full_like(like[1], float("nan"))


class _OverSGLangParts(MergedKernel, SGLangExtendMHA):
    """The parts by SGLang's extend attention, whose LSE is natural."""

    def attend(self, part: MHAInputs) -> tuple[Tensor, Tensor]:
        """In extend each query brings a key: where a part has fewer keys, its queries go in several requests.

        A request without keys is not called for; its rows are what attention over nothing is, out 0 and LSE -inf.
        """
        import torch

        from mla_verify.inputs import indptr
        from mla_verify.tensors import MLAOutput

        out, lse = empty_state(part)
        starts = part.kv_indptr.tolist()
        rows, slots = [], []
        for b in live_requests(part):
            first, end = part.q_range(b)
            num_keys = starts[b + 1] - starts[b]
            for at in range(first, end, num_keys) if num_keys else ():
                rows.append(torch.arange(at, min(at + num_keys, end), device=part.device))
                slots.append(torch.arange(starts[b], starts[b + 1], device=part.device))
        if rows:
            q_indptr = indptr([len(r) for r in rows]).to(part.device)
            at_rows = torch.cat(rows)
            mine = MLAOutput(*_unwritten((out[at_rows], lse[at_rows])))
            extend(replace(part, qo_indptr=q_indptr), part.q[at_rows], part.k, part.v, slots, mine)
            assert mine.lse is not None
            out[at_rows], lse[at_rows] = mine.out, mine.lse
        self._note(part.device.type, f"{EXTEND.name}, {_NO_PREFIX}")
        return out, lse


class SglMerge(_OverSGLangParts):
    """The compiled merge of sgl_kernel, which SGLang's chunked prefix calls on a CUDA GPU."""

    name = "sgl-merge"
    entries = (EXTEND, MERGE_V2)
    contract = Contract(form="mha", dtypes=("fp16", "bf16"), phases=MERGED_PHASES, facts=v2_facts, returns_lse=True)

    def why_unavailable(self, device: str) -> str | None:
        if device == "cpu":
            return f"{MERGE_V2.name} is compiled for a CUDA GPU"
        return super().why_unavailable(device)

    def merge(self, part: tuple[Tensor, Tensor], merged: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        out, lse = _unwritten(part)
        MERGE_V2.load()(v_a=part[0], s_a=part[1], v_b=merged[0], s_b=merged[1], v_merged=out, s_merged=lse)
        self._what = f"{EXTEND.name} (Triton), parts merged by {MERGE_V2.module}.{MERGE_V2.name}"
        return out, lse


class SGLangMerge(_OverSGLangParts):
    """The Triton merge, which SGLang takes where the compiled one does not do: other GPUs, odd dims."""

    name = "sglang-merge"
    entries = (EXTEND, MERGE_TRITON)
    contract = Contract(form="mha", phases=MERGED_PHASES, facts=triton_facts, returns_lse=True)

    def merge(self, part: tuple[Tensor, Tensor], merged: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        from mla_verify.kernels.sglang_writes import launches

        out, lse = _unwritten(part)
        with launches([(import_module(MERGE_TRITON.module), "merge_state_kernel", "Triton")]) as launched:
            MERGE_TRITON.load()(
                prefix_output=part[0],
                prefix_lse=part[1],
                suffix_output=merged[0],
                suffix_lse=merged[1],
                output=out,
                output_lse=lse,
            )
        if not launched:
            raise FallbackError(f"{MERGE_TRITON.name} did not launch its Triton kernel")
        self._note(part[0].device.type, EXTEND.name, f"parts merged by {MERGE_TRITON.name}")
        return out, lse


# A block of the merge has a thread for every 8 elements of every head (cascade.cuh:577-583), and at most 1,024.
_MOST_THREADS, _ELEMENTS_A_THREAD = 1024, 8


class FlashInferMerge(MergedKernel, FlashInferRaggedFA3):
    """FlashInfer's merge over parts by its ragged attention, fa3: LSEs in base 2 throughout."""

    name = "flashinfer-merge"
    entries = (*FlashInferRaggedFA3.entries, MERGE_FLASHINFER)
    contract = Contract(
        form="mha",
        dtypes=FlashInferRaggedFA3.contract.dtypes,
        phases=MERGED_PHASES,
        facts=flashinfer_facts,
        returns_lse=True,
        lse_base="2",
    )

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        threads = spec.num_heads * spec.dims.v_head_dim // _ELEMENTS_A_THREAD
        if threads > _MOST_THREADS:
            what = f"{spec.num_heads} heads of {spec.dims.v_head_dim}"
            return f"{what}: {MERGE_FLASHINFER.name} needs {threads} threads, of {_MOST_THREADS}"
        return super().why_not(spec, device)

    def attend(self, part: MHAInputs) -> tuple[Tensor, Tensor]:
        from mla_verify.kernels.flashinfer_calls import attend_ragged
        from mla_verify.tensors import MLAOutput

        out, lse = _unwritten(empty_state(part))
        ran = attend_ragged(self.backend, part, MLAOutput(out, lse), causal=part.causal)
        self._what = f"{ran}; {_NO_PREFIX}"
        return out, lse

    def merge(self, part: tuple[Tensor, Tensor], merged: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        with fresh_memory_is_nan():
            out, lse = MERGE_FLASHINFER.load()(v_a=part[0], s_a=part[1], v_b=merged[0], s_b=merged[1])
        self._what = f"{self._what.split('; ')[0]}; parts merged by flashinfer.{MERGE_FLASHINFER.name}"
        return out, lse
