"""Suites: which cases are run, and what each one is for.

smoke     every phase, dtype, regime, page size and head count once or twice; made for two CPU cores
standard  what a kernel change should pass on a GPU before it is merged: edges crossed with dtypes, regimes and heads
full      standard, every rank's head count with every page size, long contexts, and offsets past 2^31 and 2^32

Those of cache writes and concatenations are in copy_suites.py, those of strides and far caches in layout_suites.py,
those of form layer in layer_suites.py.

Why the grids are as they are: a fault hides where a dimension is a round number, so lengths stand at tile (32, 64),
page and split edges and one beside them; where softmax is flat, so regimes differ; where pages lie in order, so they
never do; and in head counts that a kernel pads or folds (8, 12, 20, 96), so those are there with 16 to 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle

from mla_verify import copy_suites, layer_suites, layout_suites, merge_suites
from mla_verify.cases import REGIMES, CaseSpec
from mla_verify.copy_suites import FUSED
from mla_verify.dims import ODD_HEADS, PRESETS
from mla_verify.formats import DTYPES


@dataclass(frozen=True)
class SuiteCase:
    spec: CaseSpec
    claim: str  # one sentence: what a kernel that passes is known to do


@dataclass(frozen=True)
class Suite:
    name: str
    summary: str
    build: Callable[[], Iterator[SuiteCase]]


PAGE_SIZES = (1, 16, 32, 64, 128)

# The heads one rank sees: of every preset at every TP size, and the odd ones.
RANK_HEADS = tuple(
    sorted({p.heads_at(tp) for p in PRESETS.values() for tp in p.tensor_parallel_sizes()} | set(ODD_HEADS))
)

_EDGES = "q1.kv1+q1.kv2+q1.kv0+q1.kv31+q1.kv32+q1.kv33+q1.kv63+q1.kv64+q1.kv65+q1.kv127+q1.kv129"
_EMPTIES = "q1.kv33+q1.kv0+q5.kv100+q0.kv64+q3.kv2+q2.kv0+q1.kv500"

_FLAT = "every key up to kv_len weighs in once, and none beyond"
_NEEDLE = "each key at an edge of a tile, page or split is read by the heads that look for it"
_UNEQUAL = "parts of the keys of very unequal mass merge right"
_LENGTHS = "lengths on and beside tile and page edges, and no key at all, are right in one batch"
_SPREAD = "heads from flat to one-hot, keys of uneven size and values off centre are right together"
_HEADS = "{h} heads of one rank are each right: none is padded, folded or overwritten"
_PAGES = "pages of {p} tokens are found through a permuted table, partial last pages included"
_SPEC = "each of {q} draft tokens sees the keys before it and no later draft"
_PREFILL = "causal prefill from nothing: token t sees t + 1 keys"
_TILED = "every query of {h} heads sees all its keys, wherever tiles of queries and heads are cut"
_PREFIX = "new tokens see the whole cached prefix, and causally each other"
_CHUNKED = "chunks of one prompt see exactly what came before them"
_EMPTY = "empty requests and rows without keys give 0 (LSE -inf) and leave their neighbours alone"
_FULL = "without causality every query sees every key"

# id with DT for the dtype, the dtypes it runs in, the claim
_SMOKE: tuple[tuple[str, str, str], ...] = (
    ("decode-absorbed-h16-q1.kv4096-p64-DT-uniform-s0", "fp32 fp16 bf16", _FLAT),
    ("decode-absorbed-h16-q1.kv4096-p64-DT-needle-s0", "fp32 fp16 bf16", _NEEDLE),
    (f"decode-absorbed-h16-{_EDGES}-p64-DT-normal-s0", "fp32 fp16 bf16", _LENGTHS),
    ("decode-absorbed-h16-3xq1.kv1000-p16-DT-mixed-s0", "fp32 fp16 bf16", _SPREAD),
    *(
        (f"decode-absorbed-h16-q1.kv257+q1.kv256-p{p}-DT-needle-s0", "fp16 bf16", _PAGES.format(p=p))
        for p in (1, 16, 32, 128)
    ),
    *(
        (f"decode-absorbed-h{h}-q1.kv333-p64-DT-mixed-s0", "fp16 bf16" if h < 16 else "bf16", _HEADS.format(h=h))
        for h in (8, 12, 20, 32, 64, 96, 128)
    ),
    # Few keys, so that Triton's interpreter can have many heads.
    *(
        (f"decode-absorbed-h{h}-q1.kv{n}-p16-DT-mixed-s0", dtype, _HEADS.format(h=h))
        for h, n, dtype in ((20, 61, "fp16"), (32, 61, "fp32"), (64, 33, "fp16"), (96, 17, "fp32"), (128, 33, "fp16"))
    ),
    (
        "decode-absorbed-h16-q1.kv1500-p64-DT-unequal-s0",
        "fp16 bf16",
        _UNEQUAL,
    ),
    ("decode-absorbed-h16-q1.kv450-p64-DT-unequal-s0", "fp32 fp16", _UNEQUAL),
    ("decode-absorbed-h16-3xq1.kv300-p16-DT-mixed-s0", "fp32 fp16", _SPREAD),
    ("decode-absorbed-h16-q1.kv500-p32-DT-rope-s0", "fp16 bf16", "scores that come from the RoPE part are right"),
    ("decode-absorbed-h16-q1.kv500-p32-DT-nope-s0", "fp16 bf16", "scores that come from the latent part are right"),
    ("decode-absorbed-h16-q1.kv500-p64-DT-channel-s0", "fp16", "one channel a hundred times the others drowns nothing"),
    ("decode-absorbed-h16-q1.kv500-p64-DT-peaked-s0", "fp16", "a key that wins by more than 30 is returned as it is"),
    ("spec-absorbed-h16-q2.kv130+q2.kv65-p64-DT-needle-s0", "fp16", _SPEC.format(q=2)),
    ("spec-absorbed-h16-q3.kv131+q3.kv64-p16-DT-needle-s0", "bf16", _SPEC.format(q=3)),
    ("spec-absorbed-h16-q4.kv132+q4.kv67-p1-DT-needle-s0", "fp32", _SPEC.format(q=4)),
    ("prefill-absorbed-h16-q65.kv65+q33.kv33-p64-DT-normal-s0", "fp32 bf16", _PREFILL),
    ("prefix-absorbed-h16-q17.kv300+q31.kv95-p64-DT-mixed-s0", "fp16 bf16", _PREFIX),
    ("chunked-absorbed-h16-q32.kv32+q32.kv64+q17.kv81-p16-DT-needle-s0", "fp16 bf16", _CHUNKED),
    (f"mixed-absorbed-h16-{_EMPTIES}-p64-DT-normal-s0", "fp32 fp16 bf16", _EMPTY),
    ("mixed-absorbed-h8-2xq1.kv0-p64-DT-normal-s0", "bf16", "a batch without any key is all 0, LSE -inf"),
    ("mixed-absorbed-h16-q5.kv100+q1.kv33-p16-DT-normal-full-s0", "fp16", _FULL),
    ("mixed-mha-h16-q5.kv100+q1.kv33-ragged-DT-normal-full-s0", "fp16", _FULL),
    ("decode-mha-h16-q1.kv1000+q1.kv65-ragged-DT-needle-s0", "bf16", _NEEDLE),
    ("prefix-absorbed-h20-q7.kv65-p64-DT-needle-s0", "fp16", _TILED.format(h=20)),
    ("spec-absorbed-h96-q2.kv65-p64-DT-needle-s0", "bf16", _TILED.format(h=96)),
    ("spec-mha-h16-q3.kv131+q3.kv64-ragged-DT-needle-s0", "fp16", _SPEC.format(q=3)),
    ("prefill-mha-h16-q130.kv130+q33.kv33-ragged-DT-normal-s0", "fp32 fp16 bf16", _PREFILL),
    ("prefill-mha-h16-q97.kv97-ragged-DT-uniform-s0", "bf16", _FLAT),
    ("prefix-mha-h16-q17.kv300+q31.kv95-ragged-DT-mixed-s0", "fp16 bf16", _PREFIX),
    ("chunked-mha-h16-q32.kv32+q32.kv64+q17.kv81-ragged-DT-needle-s0", "fp32", _CHUNKED),
    (f"mixed-mha-h16-{_EMPTIES}-ragged-DT-normal-s0", "bf16", _EMPTY),
    # Cat-free kernels read q_nope and q_pe, latent and rope part, wherever they lie.
    ("decode-absorbed-h16-q1.kv257+q1.kv256-p16-DT-mixed-fused-s0", "fp32 fp16 bf16", FUSED),
    ("prefix-absorbed-h16-q17.kv200+q31.kv95-p64-DT-needle-fused-s0", "fp16 bf16", FUSED),
    ("prefix-mha-h16-q17.kv200+q31.kv95-ragged-DT-needle-fused-s0", "fp16", FUSED),
    *copy_suites.SMOKE,
    *merge_suites.SMOKE,
    *layout_suites.SMOKE,
    *layer_suites.SMOKE,
)


def _smoke() -> Iterator[SuiteCase]:
    return _each(_SMOKE)


def _each(templates: Iterable[copy_suites.Template]) -> Iterator[SuiteCase]:
    for template, dtypes, claim in templates:
        for dtype in dtypes.split():
            yield _case(template, dtype, claim)


def _case(template: str, dtype: str, claim: str) -> SuiteCase:
    return SuiteCase(CaseSpec.parse(template.replace("-DT-", f"-{dtype}-")), claim)


def _standard() -> Iterator[SuiteCase]:
    yield from _smoke()
    yield from _each(copy_suites.standard())
    yield from _each(merge_suites.standard())
    yield from _each(layout_suites.standard())
    yield from _each(layer_suites.standard())
    for dtype in DTYPES:
        # Every regime at a length that is no multiple of anything, and at one that is a multiple of everything.
        for regime in REGIMES:
            claim = f"{regime} inputs are right at full, partial and short length"
            yield _case(f"decode-absorbed-h128-q1.kv4096+q1.kv3001+q1.kv77-p64-DT-{regime}-s1", dtype, claim)
            yield _case(f"prefix-absorbed-h16-q129.kv1000-p1-DT-{regime}-s1", dtype, claim)
            yield _case(f"prefix-mha-h16-q129.kv1000+q64.kv65-ragged-DT-{regime}-s1", dtype, claim)
        for p in PAGE_SIZES:
            yield _case(f"decode-absorbed-h16-8xq1.kv1023+q1.kv0-p{p}-DT-needle-s1", dtype, _PAGES.format(p=p))
        # Regimes take turns over the head counts: each pair of the two would add nothing but time.
        for h, regime in zip(RANK_HEADS, cycle(REGIMES), strict=False):
            yield _case(f"decode-absorbed-h{h}-q1.kv2049+q1.kv640-p64-DT-{regime}-s1", dtype, _HEADS.format(h=h))
            yield _case(f"prefill-mha-h{h}-q257.kv257-ragged-DT-{regime}-s1", dtype, _HEADS.format(h=h))
        # Kernels put queries and heads into one tile of rows, which the odd head counts do not divide.
        for h in ODD_HEADS:
            for requests in ("q7.kv65", "q3.kv66+q33.kv257"):
                yield _case(f"prefix-absorbed-h{h}-{requests}-p64-DT-needle-s1", dtype, _TILED.format(h=h))
        for q in (2, 3, 4):
            for h in (8, 16, 128, *ODD_HEADS):
                yield _case(f"spec-absorbed-h{h}-q{q}.kv1025+q{q}.kv{q + 1}-p64-DT-needle-s1", dtype, _SPEC.format(q=q))
        yield _case("decode-absorbed-h16-q1.kv16384-p64-DT-uniform-s1", dtype, _FLAT)
        yield _case("decode-absorbed-h16-q1.kv16384-p64-DT-needle-s1", dtype, _NEEDLE)
        yield _case("prefill-absorbed-h16-q513.kv513-p64-DT-mixed-s1", dtype, _PREFILL)
        yield _case("chunked-absorbed-h16-q256.kv256+q256.kv512+q100.kv612-p64-DT-unequal-s1", dtype, _CHUNKED)
        yield _case("chunked-mha-h16-q256.kv256+q256.kv512+q100.kv612-ragged-DT-unequal-s1", dtype, _CHUNKED)


def _full() -> Iterator[SuiteCase]:
    yield from _standard()
    yield from _each(copy_suites.full())
    yield from _each(layout_suites.full())
    for dtype in DTYPES:
        for h in RANK_HEADS:
            for p, regime in zip(PAGE_SIZES, cycle(REGIMES), strict=False):
                claim = f"{_HEADS.format(h=h)}, with pages of {p}"
                yield _case(f"decode-absorbed-h{h}-4xq1.kv1025+q1.kv64-p{p}-DT-{regime}-s2", dtype, claim)
        for regime in ("needle", "mixed", "unequal"):
            claim = "a context of 131,072 tokens loses nothing on the way"
            yield _case(f"decode-absorbed-h128-q1.kv131072-p64-DT-{regime}-s2", dtype, claim)
            yield _case(f"prefix-absorbed-h16-q64.kv32768-p64-DT-{regime}-s2", dtype, claim)
        yield _case("prefill-absorbed-h128-q1024.kv1024-p64-DT-normal-s2", dtype, _PREFILL)
        yield _case("prefill-mha-h128-q1024.kv1024-ragged-DT-normal-s2", dtype, _PREFILL)


SUITES = {
    suite.name: suite
    for suite in (
        Suite("smoke", "every phase, dtype, regime, page size and head count; for two CPU cores", _smoke),
        Suite("standard", "edges crossed with dtypes, regimes and heads; for a GPU", _standard),
        Suite(
            "full",
            "standard, every head count with every page size, long contexts, offsets past 2^32; for a GPU",
            _full,
        ),
    )
}


@lru_cache
def suite_cases(name: str) -> tuple[SuiteCase, ...]:
    """The cases of a suite of SUITES, in order, each id once."""
    return tuple({case.spec.id: case for case in reversed(list(SUITES[name].build()))}.values())[::-1]
