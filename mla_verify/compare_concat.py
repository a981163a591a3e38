"""A concatenation against its two parts, bit for bit: a copy has no rounding to excuse.

Checks, each a number of elements of which none is allowed:
    nope  elements of the first dims that are not the nope part's
    rope  elements of the last dims that are not the rope part's
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_verify.concat_inputs import bits_of, unwritten_bits
from mla_verify.results import Check, Comparison, Location
from mla_verify.tensors import ConcatInputs

_BLOCK = 1 << 26  # elements compared at a time: 2^31 of them at once would want gigabytes for the comparison alone
_FIRST_FAR = 1 << 31  # the first offset that no signed 32-bit index holds


@dataclass(frozen=True)
class _Part:
    name: str
    found: Tensor  # [T, H, d], the bits that the kernel wrote
    wanted: Tensor  # [T, H, d], or [T, 1, d] for all heads


def compare_concat(actual: Tensor, inputs: ConcatInputs) -> Comparison:
    """`actual` [T, H, D + P] against nope and rope side by side. The worst element is the first wrong one."""
    split = inputs.nope.shape[-1]
    parts = (
        _Part("nope", bits_of(actual)[..., :split], bits_of(inputs.nope)),
        _Part("rope", bits_of(actual)[..., split:], bits_of(inputs.rope)),
    )
    checks, places = [], []
    for part in parts:
        elements, rows, first = _differing(part)
        if first is None:
            checks.append(Check(part.name, 0.0, 0.0, "none"))
            continue
        what = _recognised(part, parts, first)
        detail = (
            f"{elements} of {part.found.numel()} elements of the {part.name} part are wrong, in {rows} of "
            f"{part.found.shape[0] * part.found.shape[1]} rows{f', of which the first {what}' if what else ''}"
        )
        token, head, dim = first
        dim += split if part.name == "rope" else 0
        offset = (token * actual.shape[1] + head) * actual.shape[2] + dim
        if offset >= _FIRST_FAR:
            detail += f"; the first is element {offset}, past 2^31"
        checks.append(Check(part.name, float(elements), 0.0, detail))
        places.append((token, head, dim))
    worst = _location(min(places), actual, inputs) if places else None
    return Comparison.of_bits("concat", checks, worst)


def _differing(part: _Part) -> tuple[int, int, tuple[int, int, int] | None]:
    """How many elements and how many rows (of a token and head) differ, and the first such element."""
    num_tokens, num_heads, dim = part.found.shape
    step = max(1, _BLOCK // max(1, num_heads * dim))
    elements, rows, first = 0, 0, None
    for start in range(0, num_tokens, step):
        differs = part.found[start : start + step] != part.wanted[start : start + step]
        count = int(differs.sum())
        if not count:
            continue
        elements += count
        rows += int(differs.any(-1).sum())
        if first is None:
            at = int(differs.flatten().int().argmax())
            first = (start + at // (num_heads * dim), at // dim % num_heads, at % dim)
    return elements, rows, first


def _recognised(part: _Part, parts: tuple[_Part, _Part], first: tuple[int, int, int]) -> str:
    """What stands in the first wrong row instead of its part, in words, or nothing if it is nothing known."""
    token, head, dim = first
    found, own = part.found[token, head], _row(part, token, head)
    unwritten = unwritten_bits(found.dtype)
    if bool((found[found != own] == unwritten).all()):
        return "was not written" if bool((found == unwritten).all()) else "was not written whole"
    nope, rope = (_row(p, token, head) for p in parts)
    if torch.equal(torch.cat([p.found[token, head] for p in parts]), torch.cat([rope, nope])):
        return "holds rope before nope"
    same = (part.wanted[token] == found).all(-1)  # of this token's heads
    if bool(same.any()):
        return f"holds that of head {int(same.int().argmax())}"
    same = (part.wanted[:, min(head, part.wanted.shape[1] - 1)] == found).all(-1)  # of this head's tokens
    if bool(same.any()):
        return f"holds that of token {int(same.int().argmax())} of the batch"
    for by in (-1, 1):
        if torch.equal(found[max(0, by) : len(found) + min(0, by)], own[max(0, -by) : len(own) + min(0, -by)]):
            return "is shifted by one dim"
    return _number(int(found[dim]), int(own[dim]), part)


def _row(part: _Part, token: int, head: int) -> Tensor:
    return part.wanted[token, min(head, part.wanted.shape[1] - 1)]


def _number(found: int, own: int, part: _Part) -> str:
    digits = 2 * part.found.element_size()
    mask = (1 << 4 * digits) - 1
    return f"has {found & mask:#0{digits + 2}x} where {own & mask:#0{digits + 2}x} belongs"


def _location(place: tuple[int, int, int], actual: Tensor, inputs: ConcatInputs) -> Location:
    token, head, dim = place
    split = inputs.nope.shape[-1]
    own = inputs.nope[token, head, dim] if dim < split else inputs.rope[token, head % inputs.rope.shape[1], dim - split]
    request = int((inputs.qo_indptr[1:] <= token).sum())
    return Location(
        request=request,
        token=token - int(inputs.qo_indptr[request]),
        head=head,
        dim=dim,
        actual=float(actual[place]),
        expected=float(own),
        z=float("inf"),
    )
