"""The cases of cache writes and concatenations, by suite: an id with DT for the dtype, its dtypes, and its claim.

Kernels cut tokens into blocks of 4 to 64 and turn to another kernel at 768 of them, so token counts stand on such
edges and one beside them; an edge that moves is met by the counts between. No case holds more than a tenth of what the
standard cases of its kind hold, so that no few of them decide what a run over many seeds shows.
"""

from __future__ import annotations

from collections.abc import Iterator

Template = tuple[str, str, str]

FUSED = "views of fused tensors give the bits that the same numbers give apart, and they are right"
_WRITE = "{n} new tokens are written into their slots bit by bit, and no other slot changes"
_REPEATED = "tokens that share a slot leave one of theirs there, and nothing else"
_OUTSIDE = "tokens whose slot is negative or past the end leave no trace"
_REQUESTS = "the new tokens of each request reach pages of its own, wherever its last page ends"
_BATCH = "one new token of each of {n} requests is written bit by bit, and no other slot changes"
_CONCAT = "the {what} of {n} tokens and {h} heads have nope and rope side by side, each bit as it was"
_VIEWS = "{what} are put side by side from where an engine has their parts, as slices of wider tensors"
_BY_HEAD = "{what} whose nope part lies head by head in memory are put side by side like any other"
_FAR = "{what} past 2^{bits} elements are where they belong: no offset is cut to 32 bits"

_PAGES = (1, 16, 32, 64)
_RAGGED_WRITE = "q300.kv1000+q0.kv77+q1.kv65+q900.kv900"

SMOKE: tuple[Template, ...] = (
    # 768 slots and more take another kernel in some engines.
    ("append-write-h1-q1.kv1-p64-DT-rows-s0", "fp32 fp16 bf16", _WRITE.format(n=1)),
    *((f"append-write-h1-q{n}.kv{n}-p64-DT-rows-s0", "bf16", _WRITE.format(n=n)) for n in (767, 768, 769)),
    (f"append-write-h1-{_RAGGED_WRITE}-p16-DT-rows-s0", "fp32", _WRITE.format(n=1201)),
    ("append-write-h1-q100.kv300-p1-DT-rows-fused-s0", "fp16 bf16", FUSED),
    ("append-write-h1-q100.kv300-p64-DT-repeated-s0", "fp32 fp16 bf16", _REPEATED),
    ("append-write-h1-q100.kv300-p64-DT-outside-s0", "fp32 fp16 bf16", _OUTSIDE),
    *(
        (f"{what}-concat-h{h}-q{n}.kv{n}-ragged-DT-rows-s0", dtypes, _CONCAT.format(what=what, n=n, h=h))
        for what in ("queries", "keys")
        for h, n, dtypes in ((128, 1, "fp16 bf16"), (16, 3, "fp32 bf16"), (128, 257, "bf16"))
    ),
    ("queries-concat-h16-q65.kv65-ragged-DT-rows-fused-s0", "fp16 bf16", FUSED),
    ("keys-concat-h128-q33.kv33-ragged-DT-rows-fused-s0", "fp16 bf16", _VIEWS.format(what="keys")),
    ("queries-concat-h128-q33.kv33-ragged-DT-rows-transposed-s0", "bf16", _BY_HEAD.format(what="queries")),
    ("keys-concat-h128-q33.kv33-ragged-DT-rows-transposed-s0", "fp16", _BY_HEAD.format(what="keys")),
)

_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385)
_COUNTS_OF_VIEWS = (1, 2, 3, 4, 5, 8, 16, 31, 32, 33, 64, 127, 128, 129, 200)


def standard() -> Iterator[Template]:
    """Beside those of SMOKE."""
    yield from _writes()
    for what in ("queries", "keys"):
        yield from _concatenations(what)


def _writes() -> Iterator[Template]:
    dtypes = "fp16 bf16"
    for p in _PAGES:
        for n in (1, 2, 33, 767, 768, 769, 1024, 4096):
            yield f"append-write-h1-q{n}.kv{n + n // 3}-p{p}-DT-rows-s1", dtypes, _WRITE.format(n=n)
        yield f"append-write-h1-{_RAGGED_WRITE}-p{p}-DT-rows-s1", "fp32 fp16 bf16", _REQUESTS
        for n in (100, 768, 1500):
            yield f"append-write-h1-q{n}.kv{n + 37}-p{p}-DT-outside-s1", dtypes, _OUTSIDE
    for p in (1, 16, 64):
        for n in (100, 768, 1024):
            yield f"append-write-h1-q{n}.kv{n + 37}-p{p}-DT-rows-fused-s1", dtypes, FUSED
        for n in (100, 768, 1500):
            yield f"append-write-h1-q{n}.kv{n + 37}-p{p}-DT-repeated-s1", dtypes, _REPEATED
    for p in (1, 16):
        for n, kv_len in ((64, 40), (768, 3)):
            yield f"append-write-h1-{n}xq1.kv{kv_len}-p{p}-DT-rows-s1", dtypes, _BATCH.format(n=n)


def _concatenations(what: str) -> Iterator[Template]:
    for n in _COUNTS:
        dtypes = "fp32 fp16 bf16" if n in (1, 33, 257) else "fp16 bf16"
        yield f"{what}-concat-h128-q{n}.kv{n}-ragged-DT-rows-s1", dtypes, _CONCAT.format(what=what, n=n, h=128)
    for n in _COUNTS_OF_VIEWS:
        dtypes = "fp32 fp16 bf16" if n == 33 else "fp16 bf16"
        yield f"{what}-concat-h128-q{n}.kv{n}-ragged-DT-rows-fused-s1", dtypes, _VIEWS.format(what=what)
        yield f"{what}-concat-h128-q{n}.kv{n}-ragged-DT-rows-transposed-s1", dtypes, _BY_HEAD.format(what=what)
    for h, n in ((8, 129), (12, 37), (16, 65), (20, 37), (32, 33), (64, 17), (96, 9)):
        yield f"{what}-concat-h{h}-q{n}.kv{n}-ragged-DT-rows-s1", "bf16", _CONCAT.format(what=what, n=n, h=h)


def full() -> Iterator[Template]:
    """Beside those of `standard`: offsets that 32 bits do not hold, in tensors of 4 to 17 GB."""
    for what, n, layout, dtypes, bits in (
        ("queries", 29_128, "", "bf16", 31),  # the output alone is past it: [29128, 128, 576]
        ("queries", 32_801, "", "fp16 bf16", 31),  # and so is the nope part
        # An offset of head 127 in a nope part that lies head by head: 127 * 512 * tokens.
        ("queries", 33_100, "-transposed", "bf16", 31),
        ("queries", 65_601, "", "bf16", 32),
        ("keys", 87_382, "", "bf16", 31),
        ("keys", 131_100, "", "fp16 bf16", 31),
        ("keys", 131_100, "-fused", "bf16", 32),
        ("keys", 262_200, "", "bf16", 32),
    ):
        template = f"{what}-concat-h128-q{n}.kv{n}-ragged-DT-rows{layout}-s2"
        yield template, dtypes, _FAR.format(what=what, bits=bits)
