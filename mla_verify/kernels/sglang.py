"""SGLang's Triton kernels: decode and extend attention, and the write into the latent cache.

Natively on a GPU, interpreted on a CPU (requirements/sglang-cpu.txt).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mla_verify.cases import ATTENTION_PHASES
from mla_verify.errors import FallbackError
from mla_verify.formats import FORMATS
from mla_verify.kernels.contract import Contract
from mla_verify.kernels.entry import Entry, version
from mla_verify.kernels.interpreter import TritonKernel, no_scalar_mask
from mla_verify.kernels.sglang_api import DECODE, EXTEND, JIT_WRITE, NOT_INSTALLED, WRITE, decode_facts, extend_facts
from mla_verify.kernels.sglang_calls import (
    MORE_QUERIES,
    as_pool,
    decode,
    extend,
    live_requests,
    side_by_side,
    slots_by_request,
)
from mla_verify.kernels.sglang_writes import JIT, TRITON, takes_jit, write

# Keys of each request that sglang-write-decode writes itself, as an engine writes the newest; the rest are there.
NEWEST = 16

if TYPE_CHECKING:
    from torch import Tensor

    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import AbsorbedInputs, MHAInputs, MLAOutput, WriteInputs

_SEVERAL_QUERIES = "a request has several queries, and SGLang's decode takes one of each"


class _SGLang(TritonKernel):
    entries: tuple[Entry, ...]
    _what = "nothing: no request has a query"  # the last run

    def missing(self) -> str | None:
        if find_spec("sglang") is None:
            return NOT_INSTALLED
        return super().missing()

    def why_unavailable(self, device: str) -> str | None:
        why = next((why for entry in self.entries if (why := entry.why_unusable())), None)
        # The write stores whole parts of a row under the comparison of its slot with a reserved one.
        return why or (no_scalar_mask() if device == "cpu" and WRITE in self.entries else None)

    def version(self) -> str:
        return version("sglang")

    def ran(self) -> str:
        return self._what

    def _note(self, device: str, *what: str) -> None:
        self._what = "; ".join(("Triton, interpreted" if device == "cpu" else "Triton", *what))


class _SGLangAttention(_SGLang):
    def why_not_dtype(self, dtype: str, device: str) -> str | None:
        if dtype == "fp32" and device == "cuda":
            return "Triton's dot rounds fp32 to TF32 on a GPU unless told not to, and SGLang does not tell it"
        return super().why_not_dtype(dtype, device)


class SGLangDecode(_SGLangAttention):
    name = "sglang-decode"
    entries: tuple[Entry, ...] = (DECODE,)
    contract = Contract(form="absorbed", phases=("decode",), facts=decode_facts, empty_out="any", empty_lse="any")

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        dims = spec.dims.kv_lora_rank, spec.dims.qk_rope_head_dim
        if dims not in ((512, 64), (256, 32)):
            return f"a latent of {dims[0]} and {dims[1]}: SGLang's decode takes 512 and 64, or 256 and 32"
        if spec.num_heads == 1:
            return "one head, for which SGLang's decode takes its MHA kernel, which rounds each product of q and k"
        if any(request.q_len > 1 for request in spec.requests):
            return _SEVERAL_QUERIES
        return super().why_not(spec, device)

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.tensors import MLAOutput

        live = live_requests(inputs)
        if len(live) != len(inputs.q_nope):
            raise ValueError(_SEVERAL_QUERIES)
        if live:
            slots = slots_by_request(inputs, live)
            q, how = side_by_side(inputs.q_nope, inputs.q_pe)
            pool, pool_how = self._pool(inputs, slots)
            called = decode(q, pool, slots, out.out, inputs.sm_scale)
            self._note(q.device.type, f"{DECODE.name}, {called}", f"q {how}", f"cache {pool_how}")
        return MLAOutput(out.out, None)

    def _pool(self, inputs: AbsorbedInputs, slots: list[Tensor]) -> tuple[Tensor, str]:
        """The cache to be read, [S, 1, R + P], and how it came to be."""
        return as_pool(inputs.ckv_cache, inputs.kpe_cache)


class SGLangWriteDecode(SGLangDecode):
    """Decode over a cache into which SGLang's own write has put the newest keys."""

    name = "sglang-write-decode"
    entries = (DECODE, WRITE, JIT_WRITE)

    def _pool(self, inputs: AbsorbedInputs, slots: list[Tensor]) -> tuple[Tensor, str]:
        import torch

        pool = torch.cat([inputs.ckv_cache.flatten(0, 1), inputs.kpe_cache.flatten(0, 1)], dim=-1)[:, None]
        newest = torch.cat([own[-NEWEST:] for own in slots])
        if not len(newest):
            return pool, "empty"
        ckv, kpe = (part.contiguous() for part in pool[newest, 0].split([inputs.v_dim, inputs.qk_dims[1]], dim=-1))
        pool[newest] = float("nan")
        return pool, f"with the newest keys written by {WRITE.name}, {write(pool, newest, ckv, kpe)}"


class _SGLangExtend(_SGLangAttention):
    entries: tuple[Entry, ...] = (EXTEND,)

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        if any(request.q_len > request.kv_len for request in spec.requests):
            return MORE_QUERIES
        return super().why_not(spec, device)


_EXTEND_PHASES = tuple(phase for phase in ATTENTION_PHASES if phase != "decode")


class SGLangExtend(_SGLangExtend):
    name = "sglang-extend"
    contract = Contract(
        form="absorbed",
        phases=_EXTEND_PHASES,
        facts=extend_facts,
        returns_lse=True,
        empty_out="any",
        empty_lse="any",
    )

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
        live = live_requests(inputs)
        if live:
            q, how = side_by_side(inputs.q_nope, inputs.q_pe)
            pool, pool_how = as_pool(inputs.ckv_cache, inputs.kpe_cache)
            extend(inputs, q, pool, pool[..., : inputs.v_dim], slots_by_request(inputs, live), out)
            self._note(q.device.type, EXTEND.name, f"q {how}", f"cache {pool_how}")
        return out


class SGLangExtendMHA(_SGLangExtend):
    """The non-absorbed form: every head has keys and values of its own, in a pool of one slot a key."""

    name = "sglang-extend-mha"
    contract = Contract(
        form="mha", phases=_EXTEND_PHASES, facts=extend_facts, returns_lse=True, empty_out="any", empty_lse="any"
    )

    def run(self, inputs: MHAInputs, out: MLAOutput) -> MLAOutput:
        import torch

        live = live_requests(inputs)
        if live:
            starts = inputs.kv_indptr.tolist()
            slots = [torch.arange(starts[b], starts[b + 1], device=inputs.device) for b in live]
            extend(inputs, inputs.q, inputs.k, inputs.v, slots, out)
            self._note(inputs.device.type, EXTEND.name)
        return out


class SGLangSetMLAKVBuffer(_SGLang):
    """The Triton kernel, through the function that chooses between it and a JIT kernel.

    Writes whatever slot it is given, if need be outside the cache.
    """

    name = "sglang-set-mla-kv-buffer"
    entries = (WRITE, JIT_WRITE)
    contract = Contract(form="write", skips_out_of_range=False)

    def why_unavailable(self, device: str) -> str | None:
        why = super().why_unavailable(device)
        # Rows of all dims and dtypes that engines have; 576 of 16 bits.
        if why is None and device == "cuda" and takes_jit(1, (1024, 128)):
            why = f"{WRITE.name} of {self.version()} takes {JIT} for every size on this GPU: {_THE_OTHER}"
        return why

    def why_not_dtype(self, dtype: str, device: str) -> str | None:
        return None  # bits are copied, which the interpreter does right in any dtype

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        if device == "cuda" and takes_jit(spec.num_q_tokens, part_bytes(spec)):
            return f"{WRITE.name} takes {JIT} for {spec.num_q_tokens} slots: {_THE_OTHER}"
        return super().why_not(spec, device)

    def run(self, inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.tensors import MLAOutput

        if len(inputs.slots):
            pool = out.out.view(-1, 1, out.out.shape[-1])
            what = write(pool, inputs.slots, inputs.ckv, inputs.kpe)
            if what != TRITON:
                raise FallbackError(f"asked for {TRITON}, {WRITE.name} ran {what}")
            self._note(inputs.device.type, WRITE.name)
        return MLAOutput(out.out, None)


_THE_OTHER = "that one is sglang-set-mla-kv-buffer-tma"


def part_bytes(spec: CaseSpec) -> tuple[int, int]:
    """Bytes of the latent and of the rope part of a cache row."""
    size = FORMATS[spec.dtype].torch_dtype.itemsize
    return spec.dims.kv_lora_rank * size, spec.dims.qk_rope_head_dim * size
