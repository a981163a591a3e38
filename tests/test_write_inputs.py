"""Cache writes: what their inputs hold, what the cache must hold afterwards, and what a wrong write is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_verify.cases import CaseSpec
from mla_verify.compare_write import compare_cache
from mla_verify.inputs import make_inputs
from mla_verify.results import Comparison
from mla_verify.tensors import GUARD_BYTES, AbsorbedInputs, WriteInputs, output_buffers

BITS = {"fp32": torch.int32, "fp16": torch.int16, "bf16": torch.int16}
# The second request brings nothing new, the third only new tokens. 70 + 33 tokens into pages of 16.
CASE = "append-write-h1-q70.kv90+q0.kv20+q33.kv33-p16-fp16-rows-s6"
REPEATED, OUTSIDE = CASE.replace("rows", "repeated"), CASE.replace("rows", "outside")


def inputs_of(case: str) -> WriteInputs:
    inputs = make_inputs(CaseSpec.parse(case))
    assert isinstance(inputs, WriteInputs)
    return inputs


def slot(inputs: WriteInputs, request: int, key: int) -> int:
    page_size = inputs.kv_cache.shape[1]
    return int(inputs.page_table[request, key // page_size]) * page_size + key % page_size


def new_slots(inputs: WriteInputs) -> list[int]:
    """The slot of every new token, by a loop: the last keys of each request."""
    q_lens = inputs.qo_indptr.diff().tolist()
    return [
        slot(inputs, request, key)
        for request, (q_len, kv_len) in enumerate(zip(q_lens, inputs.kv_lens.tolist(), strict=True))
        for key in range(kv_len - q_len, kv_len)
    ]


def written(inputs: WriteInputs) -> Tensor:
    """The cache after an honest write, token by token."""
    cache = inputs.kv_cache.clone()
    rows = cache.view(-1, cache.shape[-1])
    for token, row in enumerate(inputs.slots.tolist()):
        if 0 <= row < len(rows):
            rows[row] = torch.cat([inputs.ckv[token], inputs.kpe[token]])
    return cache


def failed(comparison: Comparison) -> dict[str, float]:
    return {check.name: check.value for check in comparison.checks if not check.passed}


# Inputs


@pytest.mark.parametrize("dtype", BITS)
def test_every_new_token_has_the_slot_of_its_own_key(dtype: str) -> None:
    inputs = inputs_of(CASE.replace("fp16", dtype))
    slots = inputs.slots.tolist()
    assert slots == new_slots(inputs)
    assert len(set(slots)) == len(slots) == 103
    assert inputs.slots.dtype is torch.int64
    assert inputs.ckv.shape == (103, 512) and inputs.kpe.shape == (103, 64)


def test_repeated_gives_every_fourth_token_the_slot_before_it() -> None:
    inputs = inputs_of(REPEATED)
    own, slots = new_slots(inputs), inputs.slots.tolist()
    assert [t for t in range(103) if slots[t] != own[t]] == list(range(3, 103, 4))
    assert all(slots[t] == own[t - 1] for t in range(3, 103, 4))


def test_outside_gives_every_fourth_token_a_slot_before_or_past_the_cache() -> None:
    inputs = inputs_of(OUTSIDE)
    own, slots = new_slots(inputs), inputs.slots.tolist()
    num_slots = inputs.kv_cache.shape[0] * inputs.kv_cache.shape[1]
    odd = slots[3::4]
    assert [t for t in range(103) if slots[t] != own[t]] == list(range(3, 103, 4))
    assert {-1, -2, num_slots, num_slots + 1} <= set(odd)
    # In 32 bits these would be inside.
    assert min(odd) < -(2**31) and max(odd) > 2**31
    assert not any(0 <= s < num_slots for s in odd)


@pytest.mark.parametrize("case", [CASE, REPEATED, OUTSIDE])
def test_the_cache_holds_old_keys_and_poison_everywhere_else(case: str) -> None:
    inputs = inputs_of(case)
    rows = inputs.kv_cache.view(-1, 576)
    old = {slot(inputs, 0, key) for key in range(20)} | {slot(inputs, 1, key) for key in range(20)}
    assert {s for s in range(len(rows)) if not rows[s].isnan().any()} == old
    assert {s for s in range(len(rows)) if rows[s].isnan().all()} == set(range(len(rows))) - old
    assert len(torch.unique(rows[sorted(old)], dim=0)) == len(old)


@pytest.mark.parametrize("dtype", BITS)
def test_new_rows_hold_what_arithmetic_would_change(dtype: str) -> None:
    """A kernel that adds 0, flushes subnormal numbers or clamps to the finite ones does not copy."""
    inputs = inputs_of(CASE.replace("fp16", dtype))
    for part in (inputs.ckv, inputs.kpe):
        info = torch.finfo(part.dtype)
        bits = part.contiguous().view(BITS[dtype])
        minus_zero = torch.tensor(-0.0, dtype=part.dtype).view(BITS[dtype])
        assert bool((bits == minus_zero).any())
        assert bool(((part != 0) & (part.abs() < info.smallest_normal)).any())
        assert bool((part == -info.max).any()) and bool(part.isposinf().any())
        assert not part.isnan().any()
        ordinary = part.isfinite() & (part.abs() > info.smallest_normal) & (part.abs() < info.max)
        assert 0.8 < float(ordinary.double().mean()) < 0.95


def test_the_fused_layout_holds_the_same_numbers_as_views_of_one_tensor() -> None:
    split, fused = inputs_of(CASE), inputs_of(CASE.replace("-s6", "-fused-s6"))
    for name, tensor in split.named_tensors().items():
        other = fused.named_tensors()[name]
        assert tensor.dtype is other.dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name
    assert fused.ckv.stride() == fused.kpe.stride() == (576, 1)
    assert fused.kpe.data_ptr() - fused.ckv.data_ptr() == 512 * 2
    assert split.ckv.is_contiguous() and split.kpe.is_contiguous()
    assert fused.kv_cache.is_contiguous()


def test_cases_that_differ_in_the_regime_share_no_numbers() -> None:
    ordinary = [inputs_of(case).ckv[:, :8] for case in (CASE, REPEATED, OUTSIDE)]
    assert float((ordinary[0] == ordinary[1]).double().mean()) < 0.1
    assert float((ordinary[1] == ordinary[2]).double().mean()) < 0.1


# Buffers


def test_the_buffer_of_a_cache_write_is_a_copy_of_the_cache() -> None:
    inputs = inputs_of(CASE)
    buffers = output_buffers(inputs, torch.float16)
    out = buffers.output.out
    assert torch.equal(out.view(torch.int16), inputs.kv_cache.view(torch.int16))
    assert buffers.output.lse is None
    out.zero_()
    assert float(inputs.kv_cache.nansum()) != 0.0
    assert buffers.overwritten() is None


def zone(tensor: Tensor, *, after: bool) -> Tensor:
    """The bytes around a buffer, reached as a kernel that computes addresses reaches them."""
    first = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    end = first + tensor.numel() * tensor.element_size()
    return whole[end : end + GUARD_BYTES] if after else whole[first - GUARD_BYTES : first]


@pytest.mark.parametrize("position", [0, GUARD_BYTES - 1], ids=["first", "last"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("name", "case"), [("out", CASE), ("out", "absorbed"), ("lse", "absorbed")])
def test_one_byte_next_to_a_buffer_is_noticed_and_said_where(name: str, case: str, after: bool, position: int) -> None:
    spec = CASE if case == CASE else "decode-absorbed-h3-q1.kv5-p4-bf16-normal-s0"
    inputs = make_inputs(CaseSpec.parse(spec))
    buffers = output_buffers(inputs, torch.float16 if case == CASE else torch.bfloat16)
    tensor = getattr(buffers.output, name)
    tensor.fill_(1.0)
    assert buffers.overwritten() is None
    zone(tensor, after=after)[position] += 1
    assert buffers.overwritten() == f"1 bytes right {'after' if after else 'before'} its {name} buffer"


def test_attention_buffers_are_full_of_nan_and_share_no_memory() -> None:
    inputs = make_inputs(CaseSpec.parse("decode-absorbed-h3-q1.kv5+q1.kv2-p4-bf16-normal-s0"))
    assert isinstance(inputs, AbsorbedInputs)
    output = output_buffers(inputs, torch.float32).output
    assert output.lse is not None
    assert output.out.shape == (2, 3, 512) and output.lse.shape == (2, 3)
    assert output.out.dtype is output.lse.dtype is torch.float32
    assert output.out.isnan().all() and output.lse.isnan().all()
    assert output.out.untyped_storage().data_ptr() != output.lse.untyped_storage().data_ptr()


# Comparison


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("case", [CASE, REPEATED, OUTSIDE], ids=["rows", "repeated", "outside"])
def test_an_honest_write_passes(case: str, dtype: str) -> None:
    inputs = inputs_of(case.replace("fp16", dtype))
    comparison = compare_cache(written(inputs), inputs)
    assert comparison.passed and comparison.worst is None
    assert [check.name for check in comparison.checks] == ["latent", "rope", "other_rows"]


def test_a_write_of_no_token_must_leave_the_cache_as_it_was() -> None:
    inputs = inputs_of("append-write-h1-q0.kv20-p16-fp16-rows-s0")
    assert compare_cache(inputs.kv_cache.clone(), inputs).passed
    changed = inputs.kv_cache.clone()
    changed[0, 0, 0] = 1.0
    assert failed(compare_cache(changed, inputs)) == {"other_rows": 1.0}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize(("dim", "part"), [(0, "latent"), (511, "latent"), (512, "rope"), (575, "rope")])
def test_one_wrong_bit_of_one_element_fails_its_part_and_is_located(dtype: str, dim: int, part: str) -> None:
    inputs = inputs_of(CASE.replace("fp16", dtype))
    cache = written(inputs)
    cache.view(BITS[dtype]).view(-1, 576)[inputs.slots[70], dim] ^= 1
    comparison = compare_cache(cache, inputs)
    assert failed(comparison) == {part: 1.0}
    worst = comparison.worst
    assert worst is not None
    assert (worst.request, worst.token, worst.dim) == (2, 0, dim)
    assert worst.expected == float(torch.cat([inputs.ckv[70], inputs.kpe[70]])[dim])
    detail = next(check.detail for check in comparison.checks if not check.passed)
    assert detail == f"1 of 103 written rows have a wrong {part} part: slot {int(inputs.slots[70])}"


@pytest.mark.parametrize(("dim", "part"), [(9, "latent"), (520, "rope")])
def test_zero_of_the_other_sign_is_another_number(dim: int, part: str) -> None:
    inputs = inputs_of(CASE)
    rows = inputs.ckv if part == "latent" else inputs.kpe
    rows[40, dim % 512 if part == "latent" else dim - 512] = -0.0
    cache = written(inputs)
    assert compare_cache(cache, inputs).passed
    cache.view(-1, 576)[inputs.slots[40], dim] = 0.0
    assert failed(compare_cache(cache, inputs)) == {part: 1.0}


def test_a_row_that_was_not_written_fails_and_is_said_to_hold_what_was_there() -> None:
    inputs = inputs_of(CASE)
    cache, row = written(inputs), int(inputs.slots[0])
    cache.view(-1, 576)[row] = inputs.kv_cache.view(-1, 576)[row]
    comparison = compare_cache(cache, inputs)
    assert failed(comparison) == {"latent": 1.0, "rope": 1.0}
    details = [check.detail for check in comparison.checks if not check.passed]
    assert all(f"and still hold what was there before: slot {row}" in detail for detail in details)
    assert comparison.worst is not None and comparison.worst.actual != comparison.worst.actual


def test_a_write_that_does_nothing_fails_in_every_row() -> None:
    inputs = inputs_of(CASE)
    assert failed(compare_cache(inputs.kv_cache.clone(), inputs)) == {"latent": 103.0, "rope": 103.0}


@pytest.mark.parametrize("which", ["an old key's", "a poisoned one", "page 0's first", "the last"])
def test_a_change_in_a_row_of_nobody_fails(which: str) -> None:
    inputs = inputs_of(CASE)
    taken = set(inputs.slots.tolist())
    rows = inputs.kv_cache.view(-1, 576)
    row = {
        "an old key's": slot(inputs, 1, 7),
        "a poisoned one": next(s for s in range(20, len(rows)) if rows[s].isnan().all() and s not in taken),
        "page 0's first": 0,
        "the last": len(rows) - 1,
    }[which]
    assert row not in taken
    cache = written(inputs)
    cache.view(torch.int16).view(-1, 576)[row, 300] ^= 1
    comparison = compare_cache(cache, inputs)
    assert failed(comparison) == {"other_rows": 1.0}
    assert f"1 of {len(rows) - 103} rows of other slots changed: slot {row}" in str(comparison.checks[2].detail)


def test_two_tokens_whose_rows_are_exchanged_fail() -> None:
    inputs = inputs_of(CASE)
    exchanged = inputs.slots.clone()
    exchanged[[10, 11]] = inputs.slots[[11, 10]]
    comparison = compare_cache(written(replace(inputs, slots=exchanged)), inputs)
    assert failed(comparison) == {"latent": 2.0, "rope": 2.0}
    assert comparison.worst is not None and comparison.worst.token == 10


def test_rows_that_several_tokens_share_may_be_torn_between_them_element_by_element() -> None:
    inputs = inputs_of(REPEATED)
    first, second = 10, 11
    assert inputs.slots[first] == inputs.slots[second]
    cache = written(inputs)
    a, b = (torch.cat([inputs.ckv[t], inputs.kpe[t]]) for t in (first, second))
    row = cache.view(-1, 576)[inputs.slots[first]]
    for torn in (a, b, torch.where(torch.arange(576) % 2 == 0, a, b), torch.where(torch.arange(576) < 300, a, b)):
        row.copy_(torn)
        assert compare_cache(cache, inputs).passed
    # An element of a third token, at an element that neither of the two shares with it.
    c = torch.cat([inputs.ckv[14], inputs.kpe[14]])
    dim = int(((c != a) & (c != b)).nonzero()[100])
    row[dim] = c[dim]
    comparison = compare_cache(cache, inputs)
    assert failed(comparison) == {"latent": 1.0}
    assert comparison.worst is not None and comparison.worst.token in (first, second)


def test_a_negative_slot_taken_from_the_end_fails() -> None:
    inputs = inputs_of(OUTSIDE)
    num_slots = inputs.kv_cache.shape[0] * inputs.kv_cache.shape[1]
    wrapped = torch.where(inputs.slots == -1, num_slots - 1, inputs.slots)
    assert num_slots - 1 not in inputs.slots.tolist()
    assert failed(compare_cache(written(replace(inputs, slots=wrapped)), inputs)) == {"other_rows": 1.0}


def test_a_slot_past_the_end_clamped_into_the_cache_fails() -> None:
    inputs = inputs_of(OUTSIDE)
    num_slots = inputs.kv_cache.shape[0] * inputs.kv_cache.shape[1]
    clamped = inputs.slots.clamp(0, num_slots - 1)
    # Row 0 takes those before the cache, the last one those past its end.
    comparison = compare_cache(written(replace(inputs, slots=clamped)), inputs)
    assert failed(comparison) == {"other_rows": 2.0}
    assert f"slots 0, {num_slots - 1}" in comparison.checks[2].detail
