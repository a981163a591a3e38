"""Concatenations: what their inputs hold, that only the very bits pass, and what a wrong one is told."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_verify import compare_concat, concat_inputs
from mla_verify.cases import FORM_LAYOUTS, CaseSpec
from mla_verify.concat_inputs import bits_of, lay_out, scattered_bits, unwritten_bits
from mla_verify.formats import DTYPES, FORMATS
from mla_verify.inputs import make_inputs
from mla_verify.kernels import Contract
from mla_verify.kernels.torch_concat import TorchConcat
from mla_verify.report.contracts import describe_contract
from mla_verify.results import Comparison, Verdict
from mla_verify.tensors import ConcatInputs, MLAOutput, output_buffers
from mla_verify.testing import MLACase, assert_mla, mla_cases
from tests.kernels_helper import cases, register, verify

# The second request is empty: token 5 is token 0 of the third one.
QUERIES = "queries-concat-h7-q5.kv5+q0.kv0+q6.kv6-ragged-bf16-rows-s3"
KEYS = QUERIES.replace("queries", "keys")
LAYOUTS = FORM_LAYOUTS["concat"]


def inputs_of(case: str, layout: str = "split", device: str = "cpu") -> ConcatInputs:
    inputs = make_inputs(replace(CaseSpec.parse(case), layout=layout), device)
    assert isinstance(inputs, ConcatInputs)
    return inputs


def concatenated(inputs: ConcatInputs) -> Tensor:
    """Row by row."""
    out = output_buffers(inputs, inputs.nope.dtype).output.out
    num_tokens, num_heads, split = inputs.nope.shape
    for t in range(num_tokens):
        for h in range(num_heads):
            out[t, h, :split] = inputs.nope[t, h]
            out[t, h, split:] = inputs.rope[t, h if inputs.rope.shape[1] > 1 else 0]
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))


# Inputs


def hashed(shape: tuple[int, int, int], name: str) -> list[int]:
    """The 32-bit hashes of `scattered_bits` in Python's own integers."""

    def mixed(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    keys = [(zlib.crc32(f"{name} {what}".encode()) - 2**31) % 2**32 for what in ("rows", "columns")]
    return [
        mixed(mixed(row ^ keys[0]) ^ mixed(dim ^ keys[1]))
        for row in range(shape[0] * shape[1])
        for dim in range(shape[2])
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_the_published_hash_of_their_place_on_every_device(dtype: str) -> None:
    """In Python's unbounded integers here: what wraps around in int32 does so as everywhere."""
    shape = (5, 3, 40)
    found = bits_of(scattered_bits(shape, FORMATS[dtype], "a name", "cpu")).flatten().tolist()
    size = 8 * FORMATS[dtype].torch_dtype.itemsize
    ordinary = [(x % 2**size ^ 2 ** (size - 1)) - 2 ** (size - 1) for x in hashed(shape, "a name")]
    special = [x >> 27 == 0 for x in hashed(shape, "a name")]
    assert 0 < sum(special) < len(special) / 10
    assert [f for f, s in zip(found, special, strict=True) if not s] == [
        o for o, s in zip(ordinary, special, strict=True) if not s
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [QUERIES, KEYS, KEYS.replace("bf16", "fp32")])
def test_a_gpu_makes_the_bits_that_a_cpu_makes(case: str) -> None:
    here, there = inputs_of(case), inputs_of(case, device="cuda")
    for name, tensor in here.named_tensors().items():
        other = there.named_tensors()[name]
        assert other.device.type == "cuda" and torch.equal(
            tensor.view(torch.uint8), other.cpu().contiguous().view(torch.uint8)
        )


@pytest.mark.parametrize("size", [1, 1000, 1 << 16])
def test_bits_do_not_depend_on_how_many_are_made_at_a_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = inputs_of(QUERIES)
    monkeypatch.setattr(concat_inputs, "_BLOCK", {"cpu": size})
    assert same_bits(inputs_of(QUERIES).nope, whole.nope)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_hold_what_arithmetic_would_change_and_nothing_that_means_unwritten(dtype: str) -> None:
    inputs = inputs_of(QUERIES.replace("bf16", dtype))
    for part in (inputs.nope, inputs.rope):
        info, bits = torch.finfo(part.dtype), bits_of(part)
        assert bool((bits == torch.iinfo(bits.dtype).min).any())  # -0.0
        assert bool(((part != 0) & (part.abs() < info.smallest_normal)).any())
        assert bool(part.isposinf().any()) and bool(part.isneginf().any()) and bool((part == info.max).any())
        quiet = bits & (1 << FORMATS[dtype].mantissa_bits - 1) != 0
        assert bool((part.isnan() & quiet).any()) and bool((part.isnan() & ~quiet).any())
        assert len(bits[part.isnan()].unique()) > 1
        assert not bool((bits == unwritten_bits(bits.dtype)).any())
    everything = scattered_bits((64, 64, 64), FORMATS["bf16"], "all patterns", "cpu")
    assert len(bits_of(everything).unique()) > 0.95 * 2**16
    assert not bool((bits_of(everything) == unwritten_bits(torch.int16)).any())


@pytest.mark.parametrize("case", [QUERIES, KEYS])
@pytest.mark.parametrize("part", ["nope", "rope"])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["token", "head", "dim"])
@pytest.mark.parametrize("by", [1, 2, 4])
def test_no_element_is_right_at_another_token_head_or_dim_but_by_rare_chance(
    case: str, part: str, axis: int, by: int
) -> None:
    bits = bits_of(inputs_of(case).named_tensors()[part])
    if bits.shape[axis] == 1:
        return  # the rope part of keys has one head
    other = bits.roll(by, axis)
    assert float((bits == other).double().mean()) < 0.01
    assert not bool((bits == other).all(-1).any())


def test_cases_and_parts_that_differ_share_no_bits() -> None:
    found = [
        bits_of(tensor).flatten()[:4096]
        for case in (QUERIES, KEYS, QUERIES.replace("s3", "s4"), QUERIES.replace("h7", "h8"))
        for tensor in (inputs_of(case).nope, inputs_of(case).rope)
    ]
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            size = min(len(a), len(b))
            assert float((a[:size] == b[:size]).double().mean()) < 0.01


@pytest.mark.parametrize("case", [QUERIES, KEYS])
def test_every_layout_holds_the_same_bits(case: str) -> None:
    split = inputs_of(case)
    for layout in LAYOUTS:
        for laid_out in (inputs_of(case, layout), lay_out(split, layout)):
            assert same_bits(laid_out.nope, split.nope) and same_bits(laid_out.rope, split.rope)
            assert laid_out.nope.data_ptr() != split.nope.data_ptr()
            assert laid_out.rope.data_ptr() != split.rope.data_ptr()


def test_layouts_are_those_of_an_engine() -> None:
    queries = {layout: inputs_of(QUERIES, layout) for layout in LAYOUTS}
    keys = {layout: inputs_of(KEYS, layout) for layout in LAYOUTS}
    assert queries["split"].nope.stride() == (7 * 512, 512, 1) and queries["split"].rope.stride() == (7 * 64, 64, 1)
    fused = queries["fused"]
    assert fused.nope.stride() == fused.rope.stride() == (7 * 576, 576, 1)
    assert fused.rope.data_ptr() - fused.nope.data_ptr() == 512 * 2
    # k_nope of kv_b_proj's output, rope of the latent row.
    assert keys["fused"].nope.stride() == (7 * 256, 256, 1) and keys["fused"].rope.stride()[::2] == (576, 1)
    assert keys["fused"].rope.storage_offset() == 512
    # q_nope from a product by head, q_pe out of the query.
    assert queries["transposed"].nope.stride() == (512, 11 * 512, 1)
    assert queries["transposed"].rope.stride() == (7 * 192, 192, 1)
    assert queries["transposed"].rope.storage_offset() == 128
    assert keys["transposed"].nope.stride() == (128, 11 * 128, 1)


@pytest.mark.parametrize("case", [QUERIES, KEYS])
def test_the_buffer_of_a_concatenation_is_marked_in_every_byte_and_guarded(case: str) -> None:
    inputs = inputs_of(case)
    buffers = output_buffers(inputs, torch.bfloat16)
    out = buffers.output.out
    assert out.shape == (11, 7, 576 if case == QUERIES else 192) == inputs.out_shape
    assert bool((bits_of(out) == unwritten_bits(torch.int16)).all()) and buffers.output.lse is None
    out.zero_()
    assert buffers.overwritten() is None
    out.as_strided((out.numel() + 1,), (1,))[-1] = 1.0
    assert buffers.overwritten() == "2 bytes right after its out buffer"


# Comparison


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [QUERIES, KEYS], ids=["queries", "keys"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_honest_concatenation_passes_in_every_layout(case: str, layout: str, dtype: str) -> None:
    inputs = inputs_of(case.replace("bf16", dtype), layout)
    found = compare_concat.compare_concat(concatenated(inputs), inputs)
    assert found.passed and found.worst is None
    assert [(check.name, check.value) for check in found.checks] == [("nope", 0.0), ("rope", 0.0)]


def compared(case: str, wrong: Callable[[Tensor, ConcatInputs], object]) -> Comparison:
    inputs = inputs_of(case)
    out = concatenated(inputs)
    wrong(out, inputs)
    return compare_concat.compare_concat(out, inputs)


def counts(comparison: Comparison) -> list[int]:
    return [int(check.value) for check in comparison.checks]


def details(comparison: Comparison) -> str:
    return "; ".join(check.detail for check in comparison.checks if not check.passed)


def place(comparison: Comparison) -> tuple[int, int, int, int | None] | None:
    worst = comparison.worst
    return (worst.request, worst.token, worst.head, worst.dim) if worst else None


def exchange_parts(out: Tensor, inputs: ConcatInputs) -> None:
    out.copy_(out.roll(inputs.rope.shape[-1], -1))


def next_heads_rope(out: Tensor, inputs: ConcatInputs) -> None:
    out[:, :, -64:] = out[:, :, -64:].roll(-1, 1)


def previous_token(out: Tensor, inputs: ConcatInputs) -> None:
    out[6:] = out[5:-1].clone()


def last_dim_missing(out: Tensor, inputs: ConcatInputs) -> None:
    bits_of(out)[:, :, -1] = unwritten_bits(torch.int16)


def first_dim_missing(out: Tensor, inputs: ConcatInputs) -> None:
    out[..., :-65] = out[..., 1:-64].clone()


def last_token_unwritten(out: Tensor, inputs: ConcatInputs) -> None:
    bits_of(out)[-1] = unwritten_bits(torch.int16)


def rope_left_from_another_batch(out: Tensor, inputs: ConcatInputs) -> None:
    out[2, 3, -64:] = scattered_bits((1, 1, 64), FORMATS["bf16"], "stale", "cpu")[0, 0]


def rope_of_the_first_token_for_all(out: Tensor, inputs: ConcatInputs) -> None:
    out[..., -64:] = out[:1, :, -64:].clone()


MUTANTS: tuple[tuple[Callable[[Tensor, ConcatInputs], None], str, str, tuple[int, int, int, int]], ...] = (
    (exchange_parts, QUERIES, "in 77 of 77 rows, of which the first holds rope before nope", (0, 0, 0, 0)),
    (exchange_parts, KEYS, "in 77 of 77 rows, of which the first holds rope before nope", (0, 0, 0, 0)),
    (next_heads_rope, QUERIES, "of the rope part are wrong, in 77 of 77 rows, of which the first holds that of head 1",
     (0, 0, 0, 512)),
    (previous_token, QUERIES, "in 35 of 77 rows, of which the first holds that of token 5 of the batch", (2, 1, 0, 0)),
    (previous_token, KEYS, "in 35 of 77 rows, of which the first holds that of token 5 of the batch", (2, 1, 0, 0)),
    (last_dim_missing, KEYS, "77 of 4928 elements of the rope part are wrong, in 77 of 77 rows, of which the first was "
     "not written whole", (0, 0, 0, 191)),
    (first_dim_missing, KEYS, "of which the first is shifted by one dim", (0, 0, 0, 0)),
    (last_token_unwritten, QUERIES, "448 of 4928 elements of the rope part are wrong, in 7 of 77 rows, of which the "
     "first was not written", (2, 5, 0, 0)),
    (rope_left_from_another_batch, QUERIES, "in 1 of 77 rows, of which the first has 0x", (0, 2, 3, 512)),
    (rope_of_the_first_token_for_all, KEYS, "in 70 of 77 rows, of which the first holds that of token 0 of the batch",
     (0, 1, 0, 128)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "case", "told", "where"), MUTANTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_wrong_concatenation_is_told_how_much_is_wrong_where_it_begins_and_what_stands_there(
    wrong: Callable[[Tensor, ConcatInputs], None], case: str, told: str, where: tuple[int, int, int, int]
) -> None:
    comparison = compared(case, wrong)
    assert not comparison.passed
    assert told in details(comparison)
    found = place(comparison)
    assert found is not None
    assert found[:3] == where[:3]
    # Of a row of other numbers, one in 65,536 is right by chance, and so may the first.
    assert found[3] is not None and where[3] <= found[3] <= where[3] + 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "part"), [(0, 0), (511, 0), (512, 1), (575, 1)])
def test_one_wrong_bit_fails_its_part_and_is_located(dtype: str, dim: int, part: int) -> None:
    def flip(out: Tensor, inputs: ConcatInputs) -> None:
        bits_of(out)[5, 6, dim] ^= 1

    comparison = compared(QUERIES.replace("bf16", dtype), flip)
    assert counts(comparison) == [1 - part, part]
    assert place(comparison) == (2, 0, 6, dim)
    name = ("nope", "rope")[part]
    assert f"1 of {77 * (512, 64)[part]} elements of the {name} part are wrong, in 1 of 77 rows" in details(comparison)


@pytest.mark.parametrize(
    ("own", "found"), [(0x8000, 0x0000), (0x7FA1, 0x7FE1), (0x7FC5, 0x7FC0), (0x0001, 0x0000), (0xFF80, 0xFF7F)]
)
def test_zero_sign_nan_payload_and_subnormal_are_kept_or_told_in_hex(own: int, found: int) -> None:
    """What arithmetic on the way may change: -0, a signalling NaN, its payload, a subnormal number, infinity."""
    inputs = inputs_of(KEYS)
    signed = torch.tensor([own, found], dtype=torch.int32).to(torch.int16)
    bits_of(inputs.rope)[4, 0, 9] = signed[0]
    out = concatenated(inputs)
    assert compare_concat.compare_concat(out, inputs).passed
    bits_of(out)[4, 2, 128 + 9] = signed[1]
    comparison = compare_concat.compare_concat(out, inputs)
    assert counts(comparison) == [0, 1]
    assert details(comparison).endswith(f"the first has {found:#06x} where {own:#06x} belongs")


@pytest.mark.parametrize("size", [1, 2000, 10_000])
@pytest.mark.parametrize("wrong", [previous_token, last_token_unwritten, next_heads_rope])
def test_a_verdict_does_not_depend_on_how_much_is_compared_at_a_time(
    size: int, wrong: Callable[[Tensor, ConcatInputs], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = compared(QUERIES, wrong)
    monkeypatch.setattr(compare_concat, "_BLOCK", size)
    in_parts = compared(QUERIES, wrong)
    assert in_parts.checks == at_once.checks and place(in_parts) == place(at_once)


def test_a_concatenation_of_nothing_passes() -> None:
    inputs = inputs_of("keys-concat-h128-q0.kv0-ragged-bf16-rows-s0")
    assert inputs.nope.shape == (0, 128, 128)
    assert compare_concat.compare_concat(concatenated(inputs), inputs).passed


def with_offsets_of(bits: int) -> Callable[[Tensor, ConcatInputs], None]:
    """A kernel whose offsets are signed numbers of so many bits; what goes to negative ones is lost."""

    def wrong(out: Tensor, inputs: ConcatInputs) -> None:
        right = bits_of(out).flatten().clone()
        offsets = (torch.arange(len(right)) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
        flat = bits_of(out).view(-1).fill_(unwritten_bits(torch.int16))
        flat[offsets[offsets >= 0]] = right[offsets >= 0]

    return wrong


def test_elements_lost_past_a_32_bit_offset_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a smaller scale: 15 bits and a sign for 44,352 elements."""
    monkeypatch.setattr(compare_concat, "_FIRST_FAR", 2**15)
    comparison = compared(QUERIES, with_offsets_of(16))
    assert sum(counts(comparison)) == 44_352 - 2**15
    assert "of which the first was not written; the first is element 32768, past 2^31" in details(comparison)
    assert place(comparison) == (2, 3, 0, 512)  # row 56 of 576


def test_elements_that_wrap_around_onto_the_first_ones_are_told_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """As past 2^32: 14 bits with the sign, so that element 16,384 is written over the first one."""
    monkeypatch.setattr(compare_concat, "_FIRST_FAR", 2**13)
    comparison = compared(QUERIES, with_offsets_of(14))
    assert place(comparison) == (0, 0, 0, 0)
    assert "past 2^31" not in details(comparison)


# From kernel to verdict


class Cat(TorchConcat):
    """The honest one, and what the wrong ones below change."""

    name = "cat"

    def run(self, inputs: ConcatInputs, out: MLAOutput) -> MLAOutput:
        done = super().run(inputs, out)
        self.spoil(done.out, inputs)
        return done

    def spoil(self, out: Tensor, inputs: ConcatInputs) -> None:
        pass


class RopeFirst(Cat):
    name = "rope-first"

    def spoil(self, out: Tensor, inputs: ConcatInputs) -> None:
        exchange_parts(out, inputs)


class LosesPayload(Cat):
    """A kernel that computes with what it copies: NaN comes out as another one."""

    name = "loses-payload"

    def spoil(self, out: Tensor, inputs: ConcatInputs) -> None:
        out[out.isnan()] = float("nan")


class TakesOneHead(Cat):
    """The rope part of head 0 for every head, as keys have it."""

    name = "takes-one-head"

    def spoil(self, out: Tensor, inputs: ConcatInputs) -> None:
        out[..., -64:] = inputs.rope[:, :1]


class IgnoresStrides(Cat):
    """Reads the rope part as if it were contiguous."""

    name = "ignores-strides"

    def spoil(self, out: Tensor, inputs: ConcatInputs) -> None:
        rope = inputs.rope.as_strided(inputs.rope.shape, (inputs.rope.shape[1] * 64, 64, 1))
        out[..., -64:] = rope


class DoesNothing(Cat):
    name = "does-nothing"

    def run(self, inputs: ConcatInputs, out: MLAOutput) -> MLAOutput:
        return out


class ChangesItsInput(Cat):
    name = "changes-its-input"

    def spoil(self, out: Tensor, inputs: ConcatInputs) -> None:
        inputs.rope[0, 0, 0] = 7.0


class WritesBehind(Cat):
    name = "writes-behind"

    def spoil(self, out: Tensor, inputs: ConcatInputs) -> None:
        out.as_strided((out.numel() + 1,), (1,))[-1] = 1.0


class ReturnsTheParts(Cat):
    name = "returns-the-parts"

    def run(self, inputs: ConcatInputs, out: MLAOutput) -> MLAOutput:
        return MLAOutput(inputs.nope, None)


SMALL = ["queries-concat-h16-q9.kv9-ragged-bf16-rows-s1", "keys-concat-h16-q9.kv9-ragged-fp32-rows-s1"]
VIEWS = [case.replace("-s1", f"-{layout}-s1") for case in SMALL for layout in LAYOUTS[1:]]


def test_torch_concat_passes_every_concatenation_of_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, [TorchConcat])  # type: ignore[list-item]
    run = verify(tmp_path, "--suite", "smoke")
    assert run.exit_code == 0
    assert set(run.verdicts) == {Verdict.PASS} and len(run.verdicts) >= 16
    assert {result.ran for result in run.report.results} == {"torch.cat"}
    assert {result.phase for result in run.report.results} == {"queries", "keys"}


@pytest.mark.parametrize(
    ("kernel", "case", "reason"),
    [
        (RopeFirst, SMALL[0], "concat: .* nope part are wrong, in 144 of 144 rows, .* rope before nope; .* first at "),
        (LosesPayload, SMALL[1], "concat: .* where 0x"),
        (TakesOneHead, SMALL[0], "rope part are wrong, in 135 of 144 rows, .* that of head 0; first at request 0"),
        (DoesNothing, SMALL[1], "in 144 of 144 rows, .* the first was not written; .*head 0, dim 0: actual -2.87"),
        (ChangesItsInput, SMALL[0], "changed its input rope in place"),
        (WritesBehind, SMALL[1], "wrote outside its output: 4 bytes right after its out buffer"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_fails(
    kernel: type[Cat], case: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, [kernel])  # type: ignore[list-item]
    run = verify(tmp_path, *cases(case))
    assert (run.exit_code, run.only.verdict) == (1, Verdict.FAIL)
    assert re.search(reason, run.only.reason), run.only.reason


def test_a_concatenation_that_does_not_fit_into_memory_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is made: on a CPU, running out of memory would end the whole run."""
    monkeypatch.setattr("mla_verify.memory.available", lambda: 6 * 9 * 16 * 576 * 2 - 1)
    register(monkeypatch, [TorchConcat])  # type: ignore[list-item]
    run = verify(tmp_path, *cases(SMALL[0]))
    assert (run.exit_code, run.only.verdict) == (3, Verdict.NOT_RUN)
    assert run.only.reason.startswith("out of memory: a concatenation with its inputs")
    monkeypatch.setattr("mla_verify.memory.available", lambda: 6 * 9 * 16 * 576 * 2)
    assert verify(tmp_path, *cases(SMALL[0])).exit_code == 0


def test_a_kernel_that_ignores_strides_passes_contiguous_parts_and_fails_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, [IgnoresStrides])  # type: ignore[list-item]
    run = verify(tmp_path, *cases(*SMALL, *VIEWS))
    by_case = {result.case: result.verdict for result in run.report.results}
    assert {by_case[case] for case in SMALL} == {Verdict.PASS}
    assert {by_case[case] for case in VIEWS} == {Verdict.FAIL}


def test_a_result_of_another_shape_is_wrong_in_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, [ReturnsTheParts])  # type: ignore[list-item]
    run = verify(tmp_path, *cases(SMALL[0]))
    assert run.only.verdict is Verdict.WRONG_SHAPE
    assert "shape [9, 16, 512], it must be [9, 16, 576]" in run.only.reason


def test_a_contract_that_asks_for_contiguous_parts_or_other_heads_is_not_given_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cat, "contract", Contract("concat", num_heads=(16,), strides="contiguous"))
    register(monkeypatch, [Cat])  # type: ignore[list-item]
    run = verify(tmp_path, *cases(*SMALL, *VIEWS, SMALL[0].replace("h16", "h128")))
    decided = [result.case for result in run.report.results if result.verdict is not Verdict.UNSUPPORTED]
    assert decided == SMALL


def test_a_contract_is_listed_without_what_a_concatenation_has_not() -> None:
    assert describe_contract(Contract("concat", ("bf16",), ("keys",), num_heads=(128,))) == {
        "form": "concat",
        "dtypes": "bf16",
        "phases": "keys",
        "heads": "128",
        "strides": "any",
    }


# In pytest


def test_assert_mla_takes_concatenations_of_cases_and_of_tensors() -> None:
    contract = Contract("concat")
    for case in (QUERIES, KEYS):
        mine = MLACase(CaseSpec.parse(case), contract)
        assert isinstance(mine.inputs, ConcatInputs)
        right = concatenated(mine.inputs)
        assert_mla(right, mine)
        assert_mla(right, mine.inputs)
        wrong = right.clone()
        bits_of(wrong)[3, 2, 150] ^= 1
        with pytest.raises(AssertionError, match=r"concat: (nope|rope) 1, limit 0"):
            assert_mla(wrong, mine)
        with pytest.raises(AssertionError, match=r"FAIL"):
            assert_mla(wrong, mine.inputs)


def test_a_case_of_a_concatenation_has_guarded_buffers_and_watches_its_inputs() -> None:
    mine = MLACase(CaseSpec.parse(KEYS), Contract("concat"))
    out = mine.output_buffers().out
    inputs: Any = mine.inputs
    out.copy_(concatenated(inputs))
    assert_mla(out, mine)
    out.as_strided((out.numel() + 1,), (1,))[-1] = 1.0
    with pytest.raises(AssertionError, match="wrote outside its output"):
        assert_mla(out, mine)


def test_mla_cases_gives_a_contract_its_concatenations() -> None:
    keys = mla_cases(Contract("concat", phases=("keys",), dtypes=("bf16",), num_heads=(128,)))
    assert keys and {case.spec.phase for case in keys} == {"keys"}
    assert {case.spec.layout for case in mla_cases(Contract("concat"))} == set(LAYOUTS)
    assert {case.spec.layout for case in mla_cases(Contract("concat", strides="contiguous"))} == {"split"}
