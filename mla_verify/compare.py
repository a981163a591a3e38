"""actual, expected, noise -> Comparison: where they differ, by how many sigma, and whether that can be rounding.

Statistics of one tensor, each with a limit that follows from how many numbers there are and `Constants.false_alarm`:
    nonfinite   elements whose NaN or infinity is not the expected one: none is allowed
    max_z       the largest |actual - expected| / sigma
    rms_z       root mean square of z over one head: an undeclared rounding shows here
    slope       actual regressed on expected, by head: a wrong scale shows here long before it shows in max_z
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_verify.constants import CONSTANTS, Constants
from mla_verify.expected import Expected
from mla_verify.formats import FORMATS
from mla_verify.kernels.contract import Contract, RoundingFacts
from mla_verify.key_noise import round_to, ulp
from mla_verify.noise import Noise, changed_rounding, rms_limit, z_limit
from mla_verify.results import LARGEST_Z, Check, Comparison, Location
from mla_verify.tensors import AttentionInputs, ConcatInputs, MLAInputs, MLAOutput, WriteInputs


def wrong_shape(actual: MLAOutput, inputs: MLAInputs, dtype: str, contract: Contract) -> str | None:
    """What is wrong with layout, shape, dtype or device of a result, or None. Nothing is broadcast or converted."""
    torch_dtype = FORMATS[dtype].torch_dtype
    wanted: list[tuple[str, object, tuple[int, ...], torch.dtype]]
    if isinstance(inputs, WriteInputs):
        wanted = [("the cache in out", actual.out, tuple(inputs.kv_cache.shape), torch_dtype)]
    elif isinstance(inputs, ConcatInputs):
        wanted = [("out", actual.out, inputs.out_shape, torch_dtype)]
    else:
        num_tokens, num_heads = inputs.queries.shape[:2]
        wanted = [("out", actual.out, (num_tokens, num_heads, inputs.v_dim), torch_dtype)]
        if contract.returns_lse:
            rows = (num_tokens, num_heads) if contract.lse_layout == "TH" else (num_heads, num_tokens)
            wanted.append(("lse", actual.lse, rows, torch.float32))
    if actual.lse is not None and not contract.returns_lse:
        return "lse was returned, but the contract says that there is none"
    for name, tensor, shape, needed_dtype in wanted:
        if not isinstance(tensor, Tensor):
            return f"{name} is {type(tensor).__name__}, it must be a tensor {list(shape)}"
        for what, is_, needed in (
            ("layout", tensor.layout, torch.strided),
            ("shape", list(tensor.shape), list(shape)),
            ("dtype", tensor.dtype, needed_dtype),
            ("device", tensor.device, inputs.device),
        ):
            if is_ != needed:
                return f"{name} has {what} {is_}, it must be {needed}"
    return None


def compare_output(
    actual: MLAOutput,
    expected: Expected,
    facts: RoundingFacts,
    inputs: AttentionInputs,
    constants: Constants = CONSTANTS,
) -> tuple[Comparison, ...]:
    """Compare out, and lse when it was returned. Shapes have been checked by `wrong_shape`."""
    noise = expected.noise[facts]
    comparisons = [_compare_out(actual.out.detach().double(), expected, noise, facts, inputs, constants)]
    if actual.lse is not None:
        comparisons.append(_compare_lse(actual.lse.detach().double(), expected, noise, inputs, constants))
    return tuple(comparisons)


def _compare_out(
    actual: Tensor, expected: Expected, noise: Noise, facts: RoundingFacts, inputs: AttentionInputs, c: Constants
) -> Comparison:
    o, fmt = expected.attention.out, FORMATS[facts.out_dtype]
    rounded = round_to(o, fmt)
    foreign = _foreign(actual, rounded)
    error = torch.where(actual.isfinite() & rounded.isfinite(), actual - o, 0.0)
    z = error / noise.out.sqrt()
    checks = [_nonfinite_check(foreign)]
    if z.numel():
        probability = c.false_alarm / c.statistics
        checks += [
            Check("max_z", float(z.abs().max()), z_limit(z.numel(), probability), LARGEST_Z),
            _rms_check(z, noise, probability, c),
            _slope_check(actual, expected, rounded, noise, ulp(o, fmt), probability, c),
        ]
    return _comparison("out", tuple(checks), actual, o, error, z, foreign, inputs)


def _compare_lse(actual: Tensor, expected: Expected, noise: Noise, inputs: AttentionInputs, c: Constants) -> Comparison:
    lse = expected.attention.lse
    foreign = _foreign(actual, lse)
    error = torch.where(actual.isfinite() & lse.isfinite(), actual - lse, 0.0)
    z = torch.where(lse.isfinite(), error / noise.lse.sqrt(), 0.0)
    checks = [_nonfinite_check(foreign)]
    if z.numel():
        probability = c.false_alarm / c.statistics
        detail = _other_base(actual, lse) or LARGEST_Z
        checks.append(Check("max_z", float(z.abs().max()), z_limit(z.numel(), probability), detail))
    return _comparison("lse", tuple(checks), actual, lse, error, z, foreign, inputs)


def _other_base(actual: Tensor, expected: Tensor) -> str:
    """In words, when the LSE is that of the other base: all of it off by ln 2, or by its inverse."""
    seen = actual.isfinite() & expected.isfinite() & (expected.abs() > 1e-3)
    if bool(seen.any()):
        ratio = (actual[seen] / expected[seen]).median()
        # Far nearer to it than any fault of another kind would bring all rows by chance.
        same = bool((actual[seen] / expected[seen] - ratio).abs().max() < 1e-3)
        for factor, told in (
            (1 / math.log(2), "base 2 where base e is declared"),
            (math.log(2), "base e where base 2 is"),
        ):
            if same and abs(float(ratio) - factor) < 1e-3:
                return f"all of it is {factor:.4f} times the expected: {told}"
    return ""


def _foreign(actual: Tensor, expected: Tensor) -> Tensor:
    """Elements that are NaN or infinite where the other is not, or not in the same way."""
    same = (actual == expected) | (actual.isfinite() & expected.isfinite())
    return ~same


def _nonfinite_check(foreign: Tensor) -> Check:
    count = int(foreign.sum())
    heads = sorted({int(h) for h in foreign.nonzero()[:, 1].unique()}) if count else []
    detail = f"{count} of {foreign.numel()} elements, in heads {_ranges(heads)}" if count else "none"
    return Check("nonfinite", float(count), 0.0, detail)


def _rms_check(z: Tensor, noise: Noise, probability: float, c: Constants) -> Check:
    """Root mean square of z by head. The limit counts how many independent numbers a head's z really are."""
    num_heads, v_dim = z.shape[1:]
    rms = z.square().mean((0, 2)).sqrt()  # [H]
    # Variance of the mean of one row's z^2: the dims' own roundings are independent, what comes from the keys has no
    # more directions than keys.
    row = 2 * (1 / v_dim + noise.shared.square() / noise.num_sources.clamp_min(1e-300))  # [T, H]
    dof = 2 * len(z) ** 2 / (row * noise.copies).sum(0)  # [H]
    # All light keys may be lost in all rows: then the square is not the mean that is charged, but the largest.
    largest = (1 + (1 / c.swamped - 1) * noise.lost).mean(0).sqrt()  # [H]
    limits = torch.tensor([rms_limit(d, probability / num_heads) for d in dof.tolist()], device=z.device) * largest
    head = int((rms / limits).argmax())
    return Check("rms_z", float(rms[head]), float(limits[head]), _heads(rms > limits, head))


def _slope_check(
    actual: Tensor, expected: Expected, rounded: Tensor, noise: Noise, step: Tensor, probability: float, c: Constants
) -> Check:
    """Relative scale error by head, against its standard error.

    The error is taken from the rounded expected value: it is 0 wherever the kernel rounds as that does, so that a row
    with little error of its own has next to none, and a scale error of a fraction of a unit in the last place shows.
    """
    o, d = expected.attention.out, expected.attention.direction
    reach = (d * o).sum(-1)  # [T, H], positive unless the row is 0
    weight = torch.where((reach > 0) & rounded.isfinite().all(-1), 1 / reach.clamp_min(1e-300), 0.0)
    sigma = noise.inner.sqrt()
    # An element this close to a tie may go either way, and all of a row may go one way together: its error is taken
    # from the unrounded value, and half a step of it is allowed. Only while that is rare.
    reachable = sigma * z_limit(o.numel(), probability)
    tied = (step / 2 - (rounded - o).abs() < reachable) & (sigma < c.rare * step)
    residual = torch.where(actual.isfinite() & rounded.isfinite(), actual - torch.where(tied, o, rounded), 0.0)
    slope = (d * residual).sum(-1) * weight
    allowance = (torch.where(tied, step / 2, 0.0) * d.abs()).sum(-1) * weight + noise.slope_bias
    variance = noise.slope + (d.square() * changed_rounding(step, sigma, c)).sum(-1) * weight.square()

    # Each row by its precision, but none by more than the middle one: rows of a few keys are nearly exact, and would
    # decide alone. A row that occurs m times is one row: its errors are the same each time.
    trusted = _floored_at_middle(variance + noise.slope_common.square(), weight > 0, noise.copies)
    share = torch.where(weight > 0, 1 / (trusted * noise.copies), 0.0)
    share = share / share.sum(0).clamp_min(1e-300)
    pooled = (share * slope).sum(0)  # [H]
    # Between none of an error that is known but for the kernel's other roundings and all of it, nothing is wrong.
    known = (share * noise.slope_known).sum(0)
    beyond = torch.maximum(pooled - known.clamp_min(0.0), known.clamp_max(0.0) - pooled).clamp_min(0.0)
    excess = (beyond - (share * allowance).sum(0)).clamp_min(0.0)
    # Rows scatter on their own, so that many of them pin the slope down; what they share does not average out.
    common = (share * noise.slope_common).sum(0)
    deviation = ((share.square() * noise.copies * variance).sum(0) + common.square()).sqrt()
    score = torch.where(deviation > 0, excess / deviation.clamp_min(1e-300), 0.0)
    head, limit = int(score.argmax()), z_limit(len(score), probability)
    excess_factor = float(pooled[head])
    factor = f"{1 + excess_factor:.6g}" if abs(excess_factor) > 5e-6 else f"(1 {excess_factor:+.2g})"
    return Check("slope", float(score[head]), limit, f"{_heads(score > limit, head)}: output times {factor}")


def _floored_at_middle(variance: Tensor, counts: Tensor, copies: Tensor) -> Tensor:
    """[T, H]: no variance below the median of those of its head that count, where `copies` of a row are one row."""
    ordered, order = variance.clamp_min(1e-300).masked_fill(~counts, math.inf).sort(dim=0)
    passed = torch.where(counts, 1 / copies, 0.0).gather(0, order).cumsum(0)
    # Just past one half: of two rows the less precise.
    middle = (2 * passed > passed[-1]).int().argmax(0, keepdim=True)
    return torch.maximum(variance, ordered.gather(0, middle))


def _comparison(
    name: str,
    checks: tuple[Check, ...],
    actual: Tensor,
    expected: Tensor,
    error: Tensor,
    z: Tensor,
    foreign: Tensor,
    inputs: AttentionInputs,
) -> Comparison:
    if not z.numel():
        return Comparison(name, checks, 0.0, 0.0, 0.0, None)
    ranked = z.abs().masked_fill(foreign, math.inf).nan_to_num(nan=math.inf)
    index = [int(i) for i in torch.unravel_index(ranked.argmax(), ranked.shape)]
    size = expected.abs().masked_fill(~expected.isfinite(), 0.0)
    relative = torch.where(size > 0, error.abs() / size.clamp_min(1e-300), 0.0)
    worst = _location(index, actual, expected, z, bool(foreign[tuple(index)]), inputs)
    return Comparison(
        tensor=name,
        checks=checks,
        max_abs_error=float(error.abs().max()),
        max_rel_error=float(relative.max()),
        rms_z=float(z.square().mean().sqrt()),
        worst=worst,
    )


def _location(
    index: list[int], actual: Tensor, expected: Tensor, z: Tensor, foreign: bool, inputs: AttentionInputs
) -> Location:
    # The last request that starts at or before this row and is not empty.
    request = int((inputs.qo_indptr[1:].cpu() <= index[0]).sum())
    at = tuple(index)
    return Location(
        request=request,
        token=index[0] - int(inputs.qo_indptr[request]),
        head=index[1],
        dim=index[2] if len(index) > 2 else None,
        actual=float(actual[at]),
        expected=float(expected[at]),
        z=math.inf if foreign else float(z[at]),
    )


def _heads(over: Tensor, worst: int) -> str:
    """Which heads are over the limit and which is worst: "heads 0-7, head 3 most"."""
    numbers = [int(h) for h in over.nonzero()]
    if len(numbers) < 2:
        return f"head {worst}"
    which = f"all {len(over)} heads" if len(numbers) == len(over) else f"heads {_ranges(numbers)}"
    return f"{which}, head {worst} most"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
