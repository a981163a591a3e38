"""One dot and one cast in Triton, to find out whether an interpreter does them right. Imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _dot_and_cast(a, b, wide, product, narrow):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(product + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))
    tl.store(narrow + at, tl.load(wide + at).to(narrow.dtype.element_ty))


@triton.jit
def _scalar_mask(a, to):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)
    tl.store(to + at, tl.load(a + at), mask=tl.program_id(0) == 0)


def scalar_mask(a: torch.Tensor) -> torch.Tensor:
    """A copy of a [16], made with one truth value as the mask of the whole block."""
    to = torch.empty_like(a)
    _scalar_mask[(1,)](a, to)
    return to


def dot_and_cast(a: torch.Tensor, b: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a @ b in float32 and `wide` (float32) in a's dtype; all [16, 16]."""
    product, narrow = torch.empty_like(wide), torch.empty_like(a)
    _dot_and_cast[(1,)](a, b, wide, product, narrow)
    return product, narrow
