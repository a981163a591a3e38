"""Where the numbers of a case lie in memory: a private copy for each kernel, with poison beside what it may read.

The layouts are those of cases.LAYOUTS, and hold the same numbers bit by bit:

split        each tensor contiguous, for itself
fused        q_nope and q_pe views of one [T, H, 576], ckv and kpe of one 576-wide pool, k and v of one [S, H, 320]
transposed   q_nope as the absorbing product leaves it, a [T, H, R] view of [H, T, R]; q_pe the end of a query of
             [T, H, 128 + P]; ckv and kpe the start of pool rows 64 wider than both; poison in the rest of all of these
far31/far32  ckv and kpe views of one 576-wide pool, or the 576-wide cache that is written, in which everything that is
             referenced starts at slot 2^31 / R or 2^32 / R (R = 512: slot 4,194,304 or 8,388,608). Its offset is past
             2^31 or 2^32 elements in rows of R, and so in wider ones. Poison before it.

Past 2^31 a signed 32-bit offset turns negative, and what it reaches is foreign memory or none. Past 2^32 any 32-bit
offset lands in the pool again, on poison. kpe has the offsets of ckv, since its rows are those of the pool; only for
contracts that take contiguous tensors alone the two lie apart, and kpe, with rows of P, stays below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_verify.dims import MLADims
from mla_verify.placed import NAN, Placed
from mla_verify.room import ensure_room
from mla_verify.tensors import AbsorbedInputs, ConcatInputs, MLAInputs, WriteInputs, output_buffers

# Elements that lie before the first slot that is referenced.
FAR = {"far31": 1 << 31, "far32": 1 << 32}
# Neighbours that the fused layout puts side by side in one tensor.
_FUSED = (("q_nope", "q_pe"), ("ckv_cache", "kpe_cache"), ("ckv", "kpe"), ("k", "v"))
# The part of a query before q_pe: the absorbing product has put q_nope in its place.
_QK_NOPE = MLADims().qk_nope_head_dim
# In a pool row of the transposed layout, after kpe. A multiple of 16 bytes, as vectorised loads want it.
_FOREIGN = 64


def place(inputs: MLAInputs, layout: str, *, poison: float = NAN, contiguous: bool = False) -> Placed:
    """`inputs`, which are in the split layout, in another one. All tensors are copies.

    poison: what unreferenced slots hold.  contiguous: none but contiguous tensors will do.
    Raises MemoryError where a far layout does not fit into what is free, before anything of it is allocated.
    """
    if isinstance(inputs, ConcatInputs):
        from mla_verify.concat_inputs import lay_out

        laid = lay_out(inputs, layout)
        return Placed(_copied(inputs, {"nope": laid.nope, "rope": laid.rope}), inputs)
    if layout in FAR:
        return _far(inputs, layout, poison, contiguous)
    if layout == "fused":
        return Placed(_copied(inputs, _fused(inputs)), inputs)
    if layout == "transposed":
        return _transposed(inputs, poison)
    return Placed(_copied(inputs, {}), inputs)


def _copied(inputs: MLAInputs, views: Mapping[str, Tensor]) -> MLAInputs:
    """Copies of all tensors but those that are there already."""
    tensors: dict[str, Any] = {
        name: views[name] if name in views else tensor.clone() for name, tensor in inputs.named_tensors().items()
    }
    return replace(inputs, **tensors)


def _fused(inputs: MLAInputs) -> dict[str, Tensor]:
    tensors = inputs.named_tensors()
    views: dict[str, Tensor] = {}
    for pair in _FUSED:
        if all(name in tensors for name in pair):
            parts = [tensors[name] for name in pair]
            whole = torch.cat(parts, dim=-1)
            views.update(zip(pair, whole.split([part.shape[-1] for part in parts], dim=-1), strict=True))
    return views


def _transposed(inputs: MLAInputs, poison: float) -> Placed:
    assert isinstance(inputs, AbsorbedInputs)
    by_head = inputs.q_nope.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    r, p = inputs.qk_dims
    query = _filled((*inputs.q_pe.shape[:2], _QK_NOPE + p), inputs.q_pe, poison)
    pool = _filled((*inputs.ckv_cache.shape[:2], r + p + _FOREIGN), inputs.ckv_cache, poison)
    views = {
        "q_nope": by_head.transpose(0, 1),
        "q_pe": query[..., _QK_NOPE:].copy_(inputs.q_pe),
        "ckv_cache": pool[..., :r].copy_(inputs.ckv_cache),
        "kpe_cache": pool[..., r : r + p].copy_(inputs.kpe_cache),
    }
    around = {"q_pe": query[..., :_QK_NOPE], "kpe_cache": pool[..., r + p :]}
    return Placed(_copied(inputs, views), inputs, poison, around)


def _far(inputs: MLAInputs, layout: str, poison: float, contiguous: bool) -> Placed:
    tensors = inputs.named_tensors()
    caches = {name: tensor for name, tensor in tensors.items() if name.endswith("_cache")}
    (num_pages, page_size, width), like = next(iter(caches.values())).shape, next(iter(caches.values()))
    rank = inputs.ckv.shape[-1] if isinstance(inputs, WriteInputs) else width
    first = -(-FAR[layout] // (rank * page_size))
    widths = [cache.shape[-1] for cache in caches.values()]
    rows = (first + num_pages, page_size)
    size = (first + num_pages) * page_size * sum(widths) * like.element_size()
    ensure_room(size, like.device, f"layout {layout}")
    pages = tensors["page_table"]
    # Entries behind a request's last page are no pages, and stay far outside any cache.
    moved = {"page_table": torch.where((pages >= 0) & (pages < num_pages), pages + first, pages)}
    if isinstance(inputs, WriteInputs):
        # Before the cache is before it, and past its end past its end.
        slots = torch.where(inputs.slots < 0, inputs.slots, inputs.slots + first * page_size)
        # Expanded from one element: nothing of the cache's size is there but the buffer.
        blank = _filled((1, 1, 1), like, poison).expand(*rows, width)
        buffers = output_buffers(replace(inputs, kv_cache=blank), like.dtype)
        views = moved | {"slots": slots, "kv_cache": buffers.output.out}
        placed = Placed(_copied(inputs, views), inputs, poison, {}, first, buffers)
        placed.buffers(like.dtype)  # with the cache as it was before
        return placed
    if contiguous:
        pools = [_filled((*rows, width), like, poison) for width in widths]
    else:
        pools = list(_filled((*rows, sum(widths)), like, poison).split(widths, dim=-1))
    for pool, cache in zip(pools, caches.values(), strict=True):
        pool[first:] = cache
    views = moved | dict(zip(caches, pools, strict=True))
    around = {name: views[name][:first] for name in caches}
    return Placed(_copied(inputs, views), inputs, poison, around, first)


def _filled(shape: tuple[int, ...], like: Tensor, value: float) -> Tensor:
    return torch.full(shape, value, dtype=like.dtype, device=like.device)
