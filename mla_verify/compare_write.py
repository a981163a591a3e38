"""The cache after a write against what it must hold, bit for bit: a copy has no rounding to excuse.

Checks, each a number of rows of which none is allowed:
    latent      written rows with an element of the latent part that none of their tokens brought
    rope        the same of the rope part
    other_rows  rows that no token was meant for, and that changed
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_verify.results import Check, Comparison, Location
from mla_verify.tensors import WriteInputs
from mla_verify.write_inputs import rows_of

_SHOWN = 4  # slots named in a message


def compare_cache(actual: Tensor, inputs: WriteInputs) -> Comparison:
    """`actual` [num_pages, page_size, R + P] against the cache that the inputs ask for.

    An element of a slot that several tokens have may be any one's: programs write it at once, and which one's store
    comes last is not defined, element by element. A token whose slot is negative or past the end must leave no trace.
    """
    before, after = rows_of(inputs.kv_cache), rows_of(actual)
    tokens = torch.arange(len(inputs.slots), device=before.device)
    inside = (inputs.slots >= 0) & (inputs.slots < len(before))
    slots, tokens = inputs.slots[inside], tokens[inside]
    written = torch.zeros(len(before), dtype=torch.bool, device=before.device)
    written[slots] = True
    latent = inputs.ckv.shape[-1]
    parts = {"latent": (inputs.ckv, slice(0, latent)), "rope": (inputs.kpe, slice(latent, None))}
    checks, first_wrong = [], []
    for name, (rows, columns) in parts.items():
        same = after[slots, columns] == rows_of(rows)[tokens]
        good = torch.zeros(len(before), same.shape[1], dtype=torch.int32, device=before.device)
        good.index_add_(0, slots, same.int())
        wrong = written & (good == 0).any(-1)
        held = " and still hold what was there before" if _all_equal(after, before, wrong, columns) else ""
        checks.append(_check(name, wrong, int(written.sum()), f"written rows have a wrong {name} part{held}"))
        first_wrong += [int(token) for slot, token in zip(slots.tolist(), tokens, strict=True) if wrong[slot]][:1]
    spilled = ~written & (after != before).any(-1)
    checks.append(_check("other_rows", spilled, len(written) - int(written.sum()), "rows of other slots changed"))
    worst = _location(min(first_wrong), actual, inputs) if first_wrong else None
    return Comparison.of_bits("kv_cache", checks, worst)


def _all_equal(after: Tensor, before: Tensor, rows: Tensor, columns: slice) -> bool:
    return bool(rows.any()) and torch.equal(after[rows][:, columns], before[rows][:, columns])


def _check(name: str, rows: Tensor, total: int, what: str) -> Check:
    numbers = rows.nonzero().flatten().tolist()
    if not numbers:
        return Check(name, 0.0, 0.0, "none")
    more = ", ..." if len(numbers) > _SHOWN else ""
    where = f"slot{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_SHOWN]))}{more}"
    return Check(name, float(len(numbers)), 0.0, f"{len(numbers)} of {total} {what}: {where}")


def _location(token: int, actual: Tensor, inputs: WriteInputs) -> Location:
    """The first element of a token's row that is not its own, both values as they are."""
    slot = int(inputs.slots[token])
    row = torch.cat([inputs.ckv[token], inputs.kpe[token]])
    found = actual.reshape(-1, actual.shape[-1])[slot]
    differs = rows_of(found[None])[0] != rows_of(row[None])[0]
    dim = int(differs.nonzero()[0]) if bool(differs.any()) else 0
    request = int((inputs.qo_indptr[1:] <= token).sum())
    return Location(
        request=request,
        token=token - int(inputs.qo_indptr[request]),
        head=0,
        dim=dim,
        actual=float(found[dim]),
        expected=float(row[dim]),
        z=float("inf"),
    )
