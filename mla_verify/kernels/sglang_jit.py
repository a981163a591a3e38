"""SGLang's JIT CUDA kernels: the cache write by bulk copy, and the concatenations of keys and of absorbed queries.

SGLang compiles each with nvcc at its first call. No interpreter runs them, so that they need an NVIDIA GPU.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mla_verify.errors import FallbackError
from mla_verify.kernels.contract import Contract, KernelBase
from mla_verify.kernels.entry import Entry, version
from mla_verify.kernels.fresh_memory import fresh_memory_is_nan
from mla_verify.kernels.gpu import capability, this_gpu
from mla_verify.kernels.sglang import part_bytes
from mla_verify.kernels.sglang_api import CONCAT_ABSORB_Q, CONCAT_K, JIT_WRITE, NOT_INSTALLED, WRITE
from mla_verify.kernels.sglang_writes import JIT, fits_jit, takes_jit, write, write_directly

if TYPE_CHECKING:
    from torch import Tensor

    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import ConcatInputs, MLAOutput, WriteInputs


USUAL_CUDA_HOME = "/usr/local/cuda"


class _SGLangJIT(KernelBase):
    name: str
    entries: tuple[Entry, ...]
    _what = "nothing: there is no token"  # the last run

    def missing(self) -> str | None:
        if find_spec("sglang") is None:
            return NOT_INSTALLED
        return None

    def why_unavailable(self, device: str) -> str | None:
        if device == "cpu":
            return "it is CUDA code, which no interpreter runs: it needs an NVIDIA GPU"
        why = next((why for entry in self.entries if (why := entry.why_unusable())), None)
        if why is None and not _has_nvcc():
            return "SGLang compiles it with nvcc, which is not here: put it on PATH or set CUDA_HOME"
        return why

    def version(self) -> str:
        return version("sglang")

    def ran(self) -> str:
        return self._what


def _has_nvcc() -> bool:
    """Where tvm_ffi, which builds for SGLang, looks for it (tvm_ffi/cpp/extension.py:136-156)."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), USUAL_CUDA_HOME)
    return shutil.which("nvcc") is not None or any(home and (Path(home) / "bin/nvcc").is_file() for home in homes)


class SGLangSetMLAKVBufferTMA(_SGLangJIT):
    """The write by bulk copy: through SGLang's own choice where that takes it, called directly for fewer slots.

    Each case is written twice, with slots in int64 and, into a copy of the cache, in int32. The kernel that 0.5.23 has
    in its place stores rows with ordinary vector stores.
    """

    name = "sglang-set-mla-kv-buffer-tma"
    entries = (JIT_WRITE, WRITE)
    contract = Contract(form="write", skips_out_of_range=False)

    def why_unavailable(self, device: str) -> str | None:
        if device == "cuda" and capability()[0] < 9:
            return f"needs SM 9.0 or later (H100, H200), for its bulk copies; {this_gpu()}"
        return super().why_unavailable(device)

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        sizes = part_bytes(spec)
        if not fits_jit(sizes):
            return f"rows of {sizes[0]} and {sizes[1]} bytes: it takes parts of whole 4 and rows of whole 16 bytes"
        return super().why_not(spec, device)

    def run(self, inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.tensors import MLAOutput

        if len(inputs.slots):
            pool = out.out.view(-1, 1, out.out.shape[-1])
            narrow = pool.clone()
            how = self._write(narrow, inputs.slots.int(), inputs)
            self._write(pool, inputs.slots, inputs)
            _check_same(narrow, pool, inputs.slots)
            self._what = f"{JIT}, {how}; slots in int64, and in int32 with the same result"
        return MLAOutput(out.out, None)

    def _write(self, pool: Tensor, slots: Tensor, inputs: WriteInputs) -> str:
        sizes = tuple(part.shape[-1] * part.element_size() for part in (inputs.ckv, inputs.kpe))
        if not takes_jit(len(slots), (sizes[0], sizes[1])):
            write_directly(pool, slots, inputs.ckv, inputs.kpe)
            return f"{JIT_WRITE.name} called directly"
        what = write(pool, slots, inputs.ckv, inputs.kpe)
        if what != JIT:
            raise FallbackError(f"asked for {JIT}, {WRITE.name} ran {what} for {len(slots)} slots")
        return f"through {WRITE.name}"


def _check_same(narrow: Tensor, wide: Tensor, slots: Tensor) -> None:
    """Both caches hold the same bits, but for slots of several tokens, whose programs race.

    Raises ValueError with the first slot in which they differ.
    """
    import torch

    from mla_verify.write_inputs import rows_of

    a, b = rows_of(narrow[:, 0]), rows_of(wide[:, 0])
    if torch.equal(a, b):
        return
    values, counts = slots.unique(return_counts=True)
    differing = (a != b).any(-1).nonzero()[:, 0]
    wrong = differing[~torch.isin(differing, values[counts > 1])]
    if len(wrong):
        raise ValueError(f"slots in int32 leave another cache than in int64: first in slot {int(wrong[0])}")


class _Concat(_SGLangJIT):
    _dims: tuple[int, int]

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        d = spec.dims
        nope = d.kv_lora_rank if spec.phase == "queries" else d.qk_nope_head_dim
        if (nope, d.qk_rope_head_dim) != self._dims:
            return f"parts of {nope} and {d.qk_rope_head_dim}: it takes {self._dims[0]} and {self._dims[1]}"
        return super().why_not(spec, device)


class SGLangConcatK(_Concat):
    """Honours the strides of tokens and heads (csrc/elementwise/concat_mla.cuh:143-167 of 0.5.16)."""

    name = "sglang-concat-k"
    entries = (CONCAT_K,)
    contract = Contract(form="concat", dtypes=("bf16",), phases=("keys",), num_heads=(128,))
    _dims = (128, 64)

    def run(self, inputs: ConcatInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.tensors import MLAOutput

        if len(inputs.nope):
            CONCAT_K.load()(k=out.out, k_nope=inputs.nope, k_rope=inputs.rope)
            self._what = CONCAT_K.name
        return MLAOutput(out.out, None)


class SGLangConcatAbsorbQ(_Concat):
    """Honours the strides of tokens and heads.

    But a head's number times its stride is a product of two ints (concat_mla.cuh:228 of 0.5.16, 226 of 0.5.23), which
    passes 2^31 in transposed queries of 128 heads from 33,027 tokens on.
    """

    name = "sglang-concat-absorb-q"
    entries = (CONCAT_ABSORB_Q,)
    contract = Contract(form="concat", dtypes=("bf16",), phases=("queries",))
    _dims = (512, 64)

    def run(self, inputs: ConcatInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.tensors import MLAOutput

        if not len(inputs.nope):
            return MLAOutput(out.out, None)
        with fresh_memory_is_nan():
            joined = CONCAT_ABSORB_Q.load()(a=inputs.nope, b=inputs.rope)
        self._what = CONCAT_ABSORB_Q.name
        return MLAOutput(joined, None)
