"""Cache writes of a user: two that are right, and some that also write where they must not."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_verify.kernels import Contract, mla_kernel
from mla_verify.tensors import MLAOutput, WriteInputs


def write(rows: Tensor, inputs: WriteInputs, tokens: Tensor) -> None:
    """The new rows of some tokens into `rows`, [num_slots, R + P]."""
    rows[inputs.slots[tokens]] = torch.cat([inputs.ckv, inputs.kpe], dim=-1)[tokens]


def rows_of(out: MLAOutput) -> Tensor:
    return out.out.view(-1, out.out.shape[-1])


@mla_kernel(Contract(form="write", skips_out_of_range=True))
def leaves_out_what_is_outside(inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
    rows = rows_of(out)
    write(rows, inputs, (inputs.slots >= 0) & (inputs.slots < len(rows)))
    return out


@mla_kernel(Contract(form="write", skips_out_of_range=True))
def wraps_negative_slots(inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
    """Indexing takes -1 for the last row, as it does everywhere in Python."""
    rows = rows_of(out)
    write(rows, inputs, (inputs.slots >= -len(rows)) & (inputs.slots < len(rows)))
    return out


@mla_kernel(Contract(form="write"))
def writes_the_neighbour_too(inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
    """Stores blocks of two rows; the second is put right only where its own token comes later."""
    rows = rows_of(out)
    rows[inputs.slots + 1] = torch.cat([inputs.ckv, inputs.kpe], dim=-1)
    write(rows, inputs, inputs.slots >= 0)
    return out


@mla_kernel(Contract(form="write"))
def forgets_the_rope_part(inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
    rows_of(out)[inputs.slots, : inputs.ckv.shape[-1]] = inputs.ckv
    return out


def _rows_from(out: MLAOutput, first: int) -> Tensor:
    """Rows of the cache from number `first`, with one more than it has."""
    rows = rows_of(out)
    width = rows.shape[1]
    return rows.as_strided((len(rows) + 1, width), (width, 1), rows.storage_offset() + first * width)


@mla_kernel(Contract(form="write"))
def writes_before_the_cache(inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
    """Padding goes to row -1, which engines that allocate one row more may do."""
    write(rows_of(out), inputs, inputs.slots >= 0)
    _rows_from(out, -1)[0] = 0.0
    return out


@mla_kernel(Contract(form="write"))
def writes_after_the_cache(inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
    write(rows_of(out), inputs, inputs.slots >= 0)
    _rows_from(out, 0)[-1] = 0.0
    return out
