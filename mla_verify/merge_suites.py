"""The cases of attention that is merged from parts, by suite: an id with DT for the dtype, its dtypes, and its claim.

Cached prefixes end on an edge of a chunk (kernels/merge_parts.py: 96 keys), one key after it, and far from one, beside
shorter ones that leave later chunks empty. They say as much of kernels that take all keys at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from mla_verify.cases import REGIMES
from mla_verify.copy_suites import Template

_EDGES = "cached prefixes that end on and beside an edge of a chunk, and empty chunks beside them, are merged right"
_UNEQUAL = "chunks of very unequal mass, and empty ones, are merged right"
_REGIME = "{regime} inputs are right in chunks of unequal mass, and beside empty ones"
_HEADS = "{h} heads are each merged by their own weights"

SMOKE: tuple[Template, ...] = (
    ("decode-mha-h16-q1.kv200+q1.kv97+q1.kv65-ragged-DT-unequal-s0", "fp16 bf16", _UNEQUAL),
    ("chunked-mha-h16-q32.kv32+q32.kv64+q17.kv181-ragged-DT-unequal-s0", "fp16 bf16", _UNEQUAL),
    ("mixed-mha-h16-q1.kv200+q33.kv33+q0.kv64+q5.kv102-ragged-DT-needle-s0", "fp16 bf16", _EDGES),
)


def standard() -> Iterator[Template]:
    """Beside those of SMOKE."""
    dtypes = "fp16 bf16"
    for regime in REGIMES:
        claim = _REGIME.format(regime=regime)
        yield f"prefix-mha-h16-q64.kv161+q33.kv34+q17.kv400-ragged-DT-{regime}-s1", dtypes, claim
        yield f"mixed-mha-h16-q1.kv700+q64.kv64+q5.kv102+q0.kv50+q40.kv232-ragged-DT-{regime}-s1", dtypes, claim
    for regime in ("normal", "needle", "mixed"):
        yield f"chunked-mha-h16-q96.kv96+q96.kv192+q50.kv242-ragged-DT-{regime}-s1", dtypes, _EDGES
        yield f"spec-mha-h16-q4.kv100+q2.kv98+q3.kv580-ragged-DT-{regime}-s1", dtypes, _EDGES
        yield f"decode-mha-h16-q1.kv97+q1.kv98+q1.kv1+q1.kv2000-ragged-DT-{regime}-s1", dtypes, _EDGES
    for h in (8, 32, 64):
        yield f"prefix-mha-h{h}-q40.kv300+q65.kv162-ragged-DT-unequal-s1", dtypes, _HEADS.format(h=h)
