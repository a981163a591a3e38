"""SGLang's functions: where they are, what is passed to them, and which roundings they make.

Nothing here imports SGLang until a function is asked for.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from mla_verify.kernels.contract import RoundingFacts

NUM_KV_SPLITS = 8  # SGLang's default, --triton-attention-num-kv-splits


@dataclass(frozen=True)
class Entry:
    """A function of SGLang and the parameters that are passed to it, all by name."""

    module: str
    name: str
    parameters: tuple[str, ...]

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)

    def why_unusable(self) -> str | None:
        """Why it cannot be called as it is called here, or None. Imports it."""
        try:
            function = self.load()
        # An extension module that does not fit this machine raises what it likes.
        except Exception as error:
            first_line = str(error).strip().split("\n")[0]
            return f"{version()} does not import: {type(error).__name__}: {first_line}"
        difference = self._difference(inspect.signature(function))
        return difference and f"{self.name} of {version()} is not as mla-verify knows it: its signature {difference}"

    def _difference(self, signature: inspect.Signature) -> str | None:
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        known = {p.name: p.default is p.empty for p in signature.parameters.values() if p.kind not in variable}
        missing = [name for name in self.parameters if name not in known]
        new = [name for name, is_required in known.items() if is_required and name not in self.parameters]
        parts = (f"has no {', '.join(missing)}" if missing else "", f"also needs {', '.join(new)}" if new else "")
        return " and ".join(filter(None, parts)) or None


_ATTENTION = "k_buffer", "v_buffer", "kv_indptr", "kv_indices", "sm_scale", "k_scale", "v_scale"
DECODE = Entry(
    "sglang.kernels.ops.attention.decode_attention",
    "decode_attention_fwd",
    ("q", "o", "attn_logits", "attn_lse", "num_kv_splits", "max_kv_splits", "has_mla", *_ATTENTION),
)
EXTEND = Entry(
    "sglang.kernels.ops.attention.extend_attention",
    "extend_attention_fwd",
    (
        *("q_extend", "k_extend", "v_extend", "o_extend", "qo_indptr", "custom_mask", "is_causal", "mask_indptr"),
        *("max_len_extend", "lse_extend", *_ATTENTION),
    ),
)
WRITE = Entry(
    "sglang.kernels.ops.kvcache.mla_buffer",
    "set_mla_kv_buffer_triton",
    ("kv_buffer", "loc", "cache_k_nope", "cache_k_rope"),
)


def version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return f"sglang {version_of('sglang')}"
    except PackageNotFoundError:
        return "sglang"


# Files of the installed package, with lines of 0.5.16 / 0.5.23.
_DECODE_FILE = "sglang/kernels/ops/attention/decode_attention.py"
_EXTEND_FILE = "sglang/kernels/ops/attention/extend_attention.py"


def decode_facts(dtype: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,
        rowsum="unrounded",
        partial_dtype="fp32",
        max_splits=NUM_KV_SPLITS,
        scale="product",
        tile=32,
        tensor_core_k=16,  # mma and wgmma of 16-bit operands; fp32, which would be TF32 there, runs on a CPU alone
        sources=(
            f"{_DECODE_FILE}:577 / 762: p is cast to the cache's dtype before P.V",
            f"{_DECODE_FILE}:579 / 764: the row sum adds p before that cast",
            f"{_DECODE_FILE}:531 / 708, 1034 / 1305: scores times one factor, sm_scale * k_scale, and k_scale is 1",
            f"{_DECODE_FILE}:575 / 752: exp of the scores, natural",
            f"{_DECODE_FILE}:630 / 818: BLOCK = 32 keys, whose P.V the accumulator takes at once",
            f"{_DECODE_FILE}:589-605 / 774-790, 803 / 1016: parts and their LSE are stored as they are, in float32 "
            "buffers, and merged in float32; out is rounded once",
        ),
    )


def extend_facts(dtype: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,
        rowsum="unrounded",
        scale="product",
        # Of what runs in fp32, which is the interpreter; Hopper has 64, and the other dtypes' roundings hide either.
        tile=32,
        tensor_core_k=16,  # mma and wgmma of 16-bit operands; fp32, which would be TF32 there, runs on a CPU alone
        sources=(
            f"{_EXTEND_FILE}:503, 624 / 712, 868: p is cast to the values' dtype before P.V",
            f"{_EXTEND_FILE}:483, 614 / 682, 848: the row sum adds p before that cast",
            f"{_EXTEND_FILE}:451, 582 / 646, 812: scores times one factor, sm_scale",
            f"{_EXTEND_FILE}:482, 613 / 681, 847: exp of the scores, natural; exp2 on AMD alone (1045)",
            f"{_EXTEND_FILE}:119-122 / 135-138: 32 keys a tile without a GPU, and 64 on Hopper (102 / 118)",
            f"{_EXTEND_FILE}:633-638 / 884-893: the LSE, natural, over prefix and new keys",
        ),
    )
