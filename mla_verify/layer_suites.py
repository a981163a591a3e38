"""Cases of form layer, in 16 bits, which is where something is rounded between the weights and the kernel.

The reference of a case takes 2^17 products a query, head and key, so that many heads have few keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from mla_verify.cases import REGIMES

Template = tuple[str, str, str]  # id with DT for the dtype, dtypes, claim

_DTYPES = "fp16 bf16"
_CLAIMS = {
    "decode": "one step between the layer's weights, absorbed or expanded, is the layer",
    "spec": "draft tokens between the layer's weights see no later draft",
    "prefill": "a prompt between the layer's weights, absorbed or expanded, is the layer",
    "prefix": "new tokens on a cached prefix, between the layer's weights, are the layer",
    "chunked": "chunks of one prompt, between the layer's weights, see what came before them",
    "mixed": "prompts and steps in one batch, between the layer's weights, are the layer",
    "empty": "a request and queries without keys give 0 between the layer's weights, too",
}
# In fp16 every phase, which is what Triton's interpreter does; most kernels take no query without a key.
SMOKE: tuple[Template, ...] = (
    ("decode-layer-h16-q1.kv129+q1.kv64-p64-DT-normal-s0", _DTYPES, _CLAIMS["decode"]),
    ("spec-layer-h8-q2.kv33-p1-DT-nope-s0", "fp16", _CLAIMS["spec"]),
    ("prefill-layer-h8-q17.kv17-p16-DT-needle-s0", "fp16", _CLAIMS["prefill"]),
    ("prefix-layer-h8-q3.kv100+q2.kv65-p16-DT-mixed-s0", _DTYPES, _CLAIMS["prefix"]),
    ("chunked-layer-h8-q8.kv8+q8.kv16-p16-DT-unequal-s0", "fp16", _CLAIMS["chunked"]),
    ("mixed-layer-h8-q1.kv33+q0.kv20+q3.kv40-p64-DT-normal-s0", "fp16", _CLAIMS["mixed"]),
    ("mixed-layer-h8-q1.kv33+q1.kv0+q3.kv40+q3.kv2-p64-DT-normal-s0", "bf16", _CLAIMS["empty"]),
)
# Phase -> requests by how many heads there are.
_REQUESTS = {
    "decode": {8: "q1.kv700+q1.kv129+q1.kv0+q1.kv64", 16: "q1.kv513+q1.kv333+q1.kv32", 128: "q1.kv257+q1.kv65"},
    "spec": {8: "2xq3.kv257+q2.kv65", 16: "q4.kv132+q3.kv64", 128: "q2.kv130+q2.kv33"},
    "prefill": {8: "q97.kv97+q64.kv64", 16: "q65.kv65+q33.kv33", 128: "q17.kv17+q9.kv9"},
    "prefix": {8: "q33.kv300+q17.kv64", 16: "q31.kv257+q5.kv95", 128: "q9.kv129+q3.kv65"},
    "chunked": {8: "q64.kv64+q64.kv128+q17.kv145", 16: "q32.kv32+q32.kv64+q17.kv81", 128: "q8.kv8+q8.kv16"},
    "mixed": {
        8: "q1.kv33+q1.kv0+q5.kv100+q0.kv64+q3.kv2+q2.kv0+q1.kv500",
        16: "q17.kv129+q0.kv64+q1.kv300+q5.kv9",
        128: "q1.kv129+q5.kv33+q2.kv2",
    },
}
_PAGES = (1, 16, 64)


def standard() -> Iterator[Template]:
    """Every phase with 8, 16 and 128 heads and three page sizes, in which the regimes take turns."""
    for shift, (phase, requests) in enumerate(_REQUESTS.items()):
        for i, (heads, page_size) in enumerate(product(requests, _PAGES)):
            regime = REGIMES[(i + shift) % len(REGIMES)]
            yield f"{phase}-layer-h{heads}-{requests[heads]}-p{page_size}-DT-{regime}-s1", _DTYPES, _CLAIMS[phase]
