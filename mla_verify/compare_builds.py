"""Two builds' outputs of one case: in how many bits they differ, by how many ULPs, and whether rounding explains it.

Checks, of which those without a limit of their own are there to be read:
    bits        elements that are not the same bits; 0.0 and -0.0 differ, so do two NaNs of different payload
    ulp         the largest distance in units in the last place, counted through the numbers of the coarser of both
                dtypes: 0.0 and -0.0 are one number, so are all NaNs; NaN is infinitely far from any number
    nonfinite   elements whose NaN or infinity is not the other's: none is allowed
    max_z       the largest |difference| / sigma, sigma^2 the sum of both builds' noise
    rms_z       its root mean square over one head
Their limits are those of one output against the reference (compare.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_verify.compare import _comparison, _foreign, _nonfinite_check, _rms_check
from mla_verify.constants import CONSTANTS, Constants
from mla_verify.formats import format_of
from mla_verify.noise import Noise, z_limit
from mla_verify.results import Check, Comparison
from mla_verify.tensors import AttentionInputs, CopyInputs, MLAInputs, MLAOutput, WriteInputs

PREFIX = "against "  # of the names of these comparisons: "against out", "against lse"
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BothNoises:
    here: Noise
    there: Noise


def compare_builds(
    here: MLAOutput,
    there: MLAOutput,
    inputs: MLAInputs,
    noises: BothNoises | None,
    bit_equal: bool,
    constants: Constants = CONSTANTS,
) -> tuple[Comparison, ...]:
    """Compare out, and lse where both have one. Without noises, or with bit_equal, any differing bit fails.

    Of a cache write, slots that several tokens share are left out: whose token they hold is not defined.
    """
    found = []
    for name, a, b in (("out", here.out, there.out), ("lse", here.lse, there.lse)):
        if a is None or b is None:
            continue
        if a.shape != b.shape:
            detail = f"{list(a.shape)} here, {list(b.shape)} in the other build"
            found.append(Comparison(PREFIX + name, (Check("shape", 1.0, 0.0, detail),), 0.0, 0.0, 0.0, None))
            continue
        if isinstance(inputs, WriteInputs):
            a, b = _without_shared_slots(a, inputs), _without_shared_slots(b, inputs)
        exact = bit_equal or noises is None
        checks = [_bits_check(a, b, exact), Check("ulp", worst_ulp(a, b), math.inf, _dtypes(a, b))]
        if noises is None or isinstance(inputs, CopyInputs):
            found.append(Comparison(PREFIX + name, tuple(checks), 0.0, 0.0, 0.0, None))
        else:
            found.append(_within_noise(name, a.double(), b.double(), tuple(checks), inputs, noises, constants))
    return tuple(found)


def _within_noise(
    name: str,
    a: Tensor,
    b: Tensor,
    checks: tuple[Check, ...],
    inputs: AttentionInputs,
    noises: BothNoises,
    c: Constants,
) -> Comparison:
    foreign = _foreign(a, b) & ~(a.isnan() & b.isnan())
    error = torch.where(a.isfinite() & b.isfinite(), a - b, 0.0)
    variance = getattr(noises.here, name) + getattr(noises.there, name)
    # A difference where the model charges nothing at all, or knows nothing, is never explained.
    z = torch.where(variance > 0, error / variance.sqrt(), torch.where(error != 0, math.inf, 0.0))
    checks = (*checks, _nonfinite_check(foreign))
    if z.numel():
        probability = c.false_alarm / c.statistics
        checks = (*checks, Check("max_z", float(z.abs().max()), z_limit(z.numel(), probability), "largest |z|"))
        if name == "out":
            checks = (*checks, _rms_check(z, noises.here, probability, c))
    return _comparison(PREFIX + name, checks, a, b, error, z, foreign, inputs)


def _bits_check(a: Tensor, b: Tensor, exact: bool) -> Check:
    if a.dtype != b.dtype:
        return Check("bits", float(a.numel()), 0.0 if exact else math.inf, f"{_dtypes(a, b)}: no bits in common")
    bits = _BITS[a.element_size()]
    count = int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())
    return Check("bits", float(count), 0.0 if exact else math.inf, f"{count} of {a.numel()} elements differ")


def worst_ulp(a: Tensor, b: Tensor) -> float:
    """The largest distance of two elements in units in the last place of the coarser dtype; see the module."""
    if not a.numel():
        return 0.0
    # An LSE in base 2 became float64 when it was converted; kernels store float32.
    dtypes = [torch.float32 if t.dtype == torch.float64 else t.dtype for t in (a, b)]
    coarser = min(dtypes, key=lambda dtype: -torch.finfo(dtype).eps)
    a, b = a.to(coarser), b.to(coarser)
    one_nan = a.isnan() != b.isnan()
    both = a.isnan() & b.isnan()
    distance = (_ordinal(a) - _ordinal(b)).abs().masked_fill(both, 0)
    return math.inf if bool(one_nan.any()) else float(distance.max())


def _ordinal(x: Tensor) -> Tensor:
    """int64: numbers in order, neighbours 1 apart. Floats are sign and magnitude."""
    dtype = _BITS[x.element_size()]
    bits = x.contiguous().view(dtype).long()
    magnitude = bits & torch.iinfo(dtype).max
    return torch.where(bits < 0, -magnitude, magnitude)


def _dtypes(a: Tensor, b: Tensor) -> str:
    names = [fmt.name if (fmt := format_of(t.dtype)) else str(t.dtype).removeprefix("torch.") for t in (a, b)]
    return f"of {names[0]}" if names[0] == names[1] else f"{names[0]} here, {names[1]} in the other build"


def _without_shared_slots(cache: Tensor, inputs: WriteInputs) -> Tensor:
    rows = cache.reshape(-1, cache.shape[-1])
    slots, count = inputs.slots.unique(return_counts=True)
    shared = slots[(count > 1) & (slots >= 0) & (slots < len(rows))]
    keep = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    keep[shared.to(rows.device)] = False
    return rows[keep]
