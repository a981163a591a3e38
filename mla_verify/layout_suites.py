"""Attention cases by suite whose subject is where things lie: views, far caches, and requests that hold nothing.

An id with DT for the dtype, its dtypes, and its claim, as in copy_suites.py. Cases of a far layout take a cache of 4.8
or 9.7 GB in 16 bits, and are in `full` alone: `standard` has to run where that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from mla_verify.copy_suites import FUSED, Template

_TRANSPOSED = "q_nope head by head, q_pe, ckv and kpe cut out of wider rows are read where they lie"
_BETWEEN = "requests without queries or keys between others shift none of their results"
_FAR = "keys past 2^{bits} elements of the cache are found: no offset is cut to 32 bits"
_FAR_WRITE = "{n} tokens go past 2^{bits} elements of the cache, and nothing goes anywhere else"

_GAPS = "q1.kv33+q0.kv64+q1.kv65+q0.kv0+q1.kv0+q1.kv129"
_PREFILL_GAPS = "q33.kv33+q0.kv0+q17.kv17"
_DECODE = "q1.kv700+q1.kv0+q1.kv333+q0.kv64+q1.kv65"
_PREFIX = "q33.kv300+q0.kv64+q65.kv129"

SMOKE: tuple[Template, ...] = (
    ("decode-absorbed-h16-q1.kv257+q1.kv256-p16-DT-mixed-transposed-s0", "fp32 fp16 bf16", _TRANSPOSED),
    ("prefix-absorbed-h16-q17.kv200+q31.kv95-p64-DT-needle-transposed-s0", "fp16 bf16", _TRANSPOSED),
    (f"decode-absorbed-h16-{_GAPS}-p16-DT-needle-s0", "fp16 bf16", _BETWEEN),
    (f"prefill-absorbed-h16-{_PREFILL_GAPS}-p16-DT-normal-s0", "fp16 bf16", _BETWEEN),
    (f"prefill-mha-h16-{_PREFILL_GAPS}-ragged-DT-normal-s0", "fp16 bf16", _BETWEEN),
)


def standard() -> Iterator[Template]:
    """Beside those of SMOKE."""
    for layout, claim in (("fused", FUSED), ("transposed", _TRANSPOSED)):
        yield from _absorbed(layout, claim)
    # Planners take their tiles from the average of queries, idle requests included.
    yield "decode-absorbed-h128-q1.kv65+q0.kv64-p64-DT-needle-s1", "fp16 bf16", _BETWEEN
    yield "spec-absorbed-h128-q2.kv65+3xq0.kv64-p64-DT-needle-s1", "fp16 bf16", _BETWEEN


def full() -> Iterator[Template]:
    """Beside those of `standard`."""
    for bits in (31, 32):
        yield from _absorbed(f"far{bits}", _FAR.format(bits=bits))
        for p, n in product((1, 64), (100, 769)):  # from 768 tokens on, some engines write with another kernel
            claim = _FAR_WRITE.format(n=n, bits=bits)
            yield f"append-write-h1-q{n}.kv{n + 200}-p{p}-DT-rows-far{bits}-s2", "fp16 bf16", claim
        yield f"append-write-h1-q100.kv300-p1-DT-outside-far{bits}-s2", "bf16", _FAR_WRITE.format(n=75, bits=bits)


def _absorbed(layout: str, claim: str) -> Iterator[Template]:
    for h, p in product((16, 128), (1, 64)):
        yield f"decode-absorbed-h{h}-{_DECODE}-p{p}-DT-mixed-{layout}-s1", "fp16 bf16", claim
        yield f"prefix-absorbed-h{h}-{_PREFIX}-p{p}-DT-needle-{layout}-s1", "fp16 bf16", claim
