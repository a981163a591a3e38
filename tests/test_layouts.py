"""Layouts: the same numbers lie where they are said to lie, poison lies beside them, and who reads past them fails."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_verify import layouts
from mla_verify.cases import FORM_LAYOUTS, CaseSpec, Request
from mla_verify.dims import MLADims
from mla_verify.execute import HUGE, execute
from mla_verify.formats import FORMATS
from mla_verify.inputs import GARBAGE_PAGE, make_inputs, slots_of
from mla_verify.kernels.contract import Contract
from mla_verify.layouts import place
from mla_verify.placed import Placed, first_other_row
from mla_verify.results import Verdict
from mla_verify.tensors import AbsorbedInputs, MLAOutput, WriteInputs
from mla_verify.testing import MLACase, assert_mla
from tests.kernels_helper import Run, cases, register, verify
from tests.wrong_kernels import EMULATED, Honest

# Elements before the first referenced slot; nobody allocates 2^32 of them here.
NEAR = {"far31": 1 << 17, "far32": 1 << 18}
REAL = dict(layouts.FAR)
DECODE = "decode-absorbed-h8-q1.kv70+q1.kv0+q1.kv33-p16-bf16-mixed-LAYOUT-s7"
WRITE = "append-write-h1-q40.kv70+q0.kv9+q20.kv20-p16-fp16-rows-LAYOUT-s7"
FAR = tuple(NEAR)
BITS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(autouse=True)
def far_is_near() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # hypothesis asks for one that holds for all its examples
        patch.setattr(layouts, "FAR", NEAR)
        yield


def spec_of(template: str, layout: str) -> CaseSpec:
    return CaseSpec.parse(template.replace("-LAYOUT", "" if layout == "split" else f"-{layout}"))


def placed(template: str, layout: str, **how: object) -> Placed:
    split = make_inputs(replace(spec_of(template, layout), layout="split"))
    return place(split, layout, **how)  # type: ignore[arg-type]


def absorbed(template: str, layout: str, **how: object) -> AbsorbedInputs:
    inputs = placed(template, layout, **how).inputs
    assert isinstance(inputs, AbsorbedInputs)
    return inputs


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def keys_of(inputs: AbsorbedInputs, request: int) -> tuple[Tensor, Tensor]:
    slots = slots_of(inputs.page_table, request, inputs.ckv_cache.shape[1], int(inputs.kv_lens[request]))
    return inputs.ckv_cache.flatten(0, 1)[slots], inputs.kpe_cache.flatten(0, 1)[slots]


# The same numbers


lengths = st.tuples(st.integers(0, 3), st.integers(0, 50))
specs = st.builds(
    lambda requests, heads, page_size, dtype, layout: CaseSpec(
        "mixed",
        "absorbed",
        heads,
        tuple(Request(*r) for r in requests),
        page_size,
        dtype,
        "normal",
        layout=layout,
        dims=MLADims(32, 8, 16, 16),
    ),
    st.lists(lengths, min_size=2, max_size=4),
    st.integers(1, 3),
    st.sampled_from((1, 2, 16, 64)),
    st.sampled_from(tuple(FORMATS)),
    st.sampled_from(FORM_LAYOUTS["absorbed"]),
)


@settings(deadline=None, max_examples=80)
@given(specs)
def test_each_layout_gives_every_request_the_queries_and_keys_of_the_split_one(spec: CaseSpec) -> None:
    split = make_inputs(replace(spec, layout="split"))
    mine = place(split, spec.layout)
    assert isinstance(split, AbsorbedInputs) and isinstance(mine.inputs, AbsorbedInputs)
    for name in ("q_nope", "q_pe", "kv_lens", "qo_indptr"):
        assert torch.equal(getattr(mine.inputs, name), getattr(split, name))
    for request in range(len(spec.requests)):
        for given_part, part in zip(keys_of(mine.inputs, request), keys_of(split, request), strict=True):
            assert torch.equal(bits(given_part), bits(part))
    assert mine.damage() is None
    # And nothing is shared with what other kernels get.
    for name, tensor in mine.inputs.named_tensors().items():
        if tensor.numel():
            before = split.named_tensors()[name].clone()
            tensor.fill_(3)
            assert torch.equal(split.named_tensors()[name].nan_to_num(9), before.nan_to_num(9)), name


@settings(deadline=None, max_examples=40)
@given(specs)
def test_what_a_far_or_transposed_cache_holds_beside_the_case_is_nan(spec: CaseSpec) -> None:
    mine = place(make_inputs(replace(spec, layout="split")), spec.layout).inputs
    assert isinstance(mine, AbsorbedInputs)
    for part, cache in enumerate((mine.ckv_cache, mine.kpe_cache)):
        used = torch.zeros(cache.shape[:2], dtype=torch.bool).flatten()
        for request, kv_len in enumerate(mine.kv_lens.tolist()):
            used[slots_of(mine.page_table, request, spec.page_size, kv_len)] = True
        assert cache.flatten(0, 1)[~used].isnan().all(), part
        assert cache.flatten(0, 1)[used].isfinite().all(), part


def test_the_transposed_layout_lies_as_an_engine_leaves_it() -> None:
    inputs = absorbed(DECODE, "transposed")
    tokens, heads, page_size = 3, 8, 16
    assert inputs.q_nope.stride() == (512, tokens * 512, 1)
    assert inputs.q_pe.stride() == (heads * 192, 192, 1) and inputs.q_pe.storage_offset() == 128
    assert inputs.ckv_cache.stride() == inputs.kpe_cache.stride() == (page_size * 640, 640, 1)
    assert (inputs.ckv_cache.storage_offset(), inputs.kpe_cache.storage_offset()) == (0, 512)
    assert inputs.ckv_cache.untyped_storage().data_ptr() == inputs.kpe_cache.untyped_storage().data_ptr()


def test_beside_the_slices_of_the_transposed_layout_lies_nan() -> None:
    inputs = absorbed(DECODE, "transposed")
    query = inputs.q_pe.as_strided((3, 8, 192), inputs.q_pe.stride(), 0)
    assert query[..., :128].isnan().all() and query[..., 128:].isfinite().all()
    rows = inputs.ckv_cache.as_strided((*inputs.ckv_cache.shape[:2], 640), inputs.ckv_cache.stride(), 0)
    assert rows[..., 576:].isnan().all()


def test_the_fused_layout_puts_the_two_parts_side_by_side() -> None:
    inputs = absorbed(DECODE, "fused")
    for first, second in ((inputs.q_nope, inputs.q_pe), (inputs.ckv_cache, inputs.kpe_cache)):
        assert first.stride() == second.stride() and first.stride(-2) == 576
        assert second.data_ptr() - first.data_ptr() == 512 * 2


@pytest.mark.parametrize("layout", FAR)
def test_every_slot_of_a_far_case_lies_past_the_offset_in_rows_of_the_latent_and_of_the_pool(layout: str) -> None:
    inputs, split = absorbed(DECODE, layout), absorbed(DECODE, "split")
    assert inputs.ckv_cache.stride() == inputs.kpe_cache.stride() == (16 * 576, 576, 1)
    used = inputs.page_table != GARBAGE_PAGE
    assert torch.equal(used, split.page_table != GARBAGE_PAGE)
    pages = inputs.page_table[used].long()
    assert int(pages.min()) * 16 * 512 > NEAR[layout]
    # The first slot of the region is the first past the offset: not more memory than it takes.
    first = int((pages - split.page_table[used].long()).unique())
    assert (first - 1) * 16 * 512 < NEAR[layout] <= first * 16 * 512
    assert inputs.ckv_cache.shape[0] == first + split.ckv_cache.shape[0]


@pytest.mark.parametrize(("layout", "slots", "gigabytes"), [("far31", 4_194_304, 4.8), ("far32", 8_388_608, 9.7)])
@pytest.mark.parametrize("template", [DECODE, WRITE])
def test_a_far_layout_that_does_not_fit_is_refused_with_its_size_before_it_is_made(
    template: str, layout: str, slots: int, gigabytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(replace(spec_of(template, layout), layout="split"))
    monkeypatch.setattr(layouts, "FAR", REAL)
    monkeypatch.setattr("mla_verify.memory.available", lambda: 3_000_000_000)
    monkeypatch.setattr("torch.full", None)
    with pytest.raises(MemoryError, match=rf"layout {layout} takes {gigabytes} GB.*; 3.0 GB are free"):
        place(inputs, layout)
    # 512 wide, a slot's offset is past 2^31 from slot 4,194,304 on; 576 wide already from 3,728,271 on.
    assert slots * 512 == 2 ** int(layout[3:]) < slots * 576 and round(slots * 576 * 2 / 1e9, 1) == gigabytes


def test_a_cache_of_contiguous_tensors_is_far_in_the_latent_alone() -> None:
    inputs = absorbed(DECODE, "far32", contiguous=True)
    assert inputs.ckv_cache.is_contiguous() and inputs.kpe_cache.is_contiguous()
    assert int(inputs.page_table[inputs.page_table != GARBAGE_PAGE].min()) * 16 * 512 > NEAR["far32"]


def test_a_kernel_that_needs_finite_tails_gets_them_in_a_far_cache_too() -> None:
    inputs = absorbed(DECODE, "far31", poison=HUGE)
    assert (inputs.ckv_cache[: NEAR["far31"] // (16 * 512)] == HUGE).all()


# Cache writes


@pytest.mark.parametrize("layout", FAR)
def test_a_far_cache_is_written_where_it_lies_and_is_there_once(layout: str) -> None:
    mine = placed(WRITE, layout)
    split = mine.plain
    assert isinstance(mine.inputs, WriteInputs) and isinstance(split, WriteInputs)
    first = len(mine.inputs.kv_cache) - len(split.kv_cache)
    assert torch.equal(bits(mine.inputs.kv_cache[first:]), bits(split.kv_cache))
    out = mine.buffers(torch.float16).output.out
    assert out.data_ptr() == mine.inputs.kv_cache.data_ptr()
    assert torch.equal(mine.inputs.slots, split.slots + first * 16)
    assert int(mine.inputs.slots.min()) * 512 > NEAR[layout]
    assert out[:first].isnan().all()
    assert torch.equal(bits(out[first:]), bits(split.kv_cache))
    assert torch.equal(bits(mine.result(MLAOutput(out, None)).out), bits(split.kv_cache))


def test_slots_outside_the_cache_are_outside_of_the_far_one() -> None:
    mine = placed(WRITE.replace("rows", "outside"), "far31")
    assert isinstance(mine.inputs, WriteInputs) and isinstance(mine.plain, WriteInputs)
    count, plain_count = (math.prod(i.kv_cache.shape[:2]) for i in (mine.inputs, mine.plain))
    assert (mine.plain.slots < 0).any() and (mine.plain.slots >= plain_count).any()
    assert torch.equal(mine.inputs.slots < 0, mine.plain.slots < 0)
    assert torch.equal(mine.inputs.slots >= count, mine.plain.slots >= plain_count)


# What nobody may change


@pytest.mark.parametrize(
    ("layout", "name", "where"),
    [
        ("transposed", "q_pe", lambda i: i.q_pe.as_strided((1,), (1,), 5 * 192 + 127)),
        ("transposed", "kpe_cache", lambda i: i.kpe_cache.as_strided((1,), (1,), 7 * 640 + 576)),
        ("far31", "ckv_cache", lambda i: i.ckv_cache[0, 3, 511:]),
        ("far32", "kpe_cache", lambda i: i.kpe_cache[1, 0, :1]),
    ],
)
def test_one_element_that_changes_beside_an_input_is_noticed(layout: str, name: str, where: object) -> None:
    mine = placed(DECODE, layout)
    assert mine.damage() is None
    where(mine.inputs).fill_(0.0)  # type: ignore[operator]
    row = {"q_pe": 5, "kpe_cache": 7 if layout == "transposed" else 16, "ckv_cache": 3}[name]
    assert mine.damage() == f"the kernel changed what lies beside its input {name}, first in row {row}"


@pytest.mark.parametrize("layout", FORM_LAYOUTS["absorbed"])
@pytest.mark.parametrize("name", ["q_nope", "q_pe", "ckv_cache", "kpe_cache", "page_table", "kv_lens"])
def test_one_element_of_an_input_that_changes_is_noticed(layout: str, name: str) -> None:
    mine = placed(DECODE, layout)
    tensor = mine.inputs.named_tensors()[name]
    tensor[(-1,) * tensor.dim()] = 5  # the last page lies in the region of the case
    assert mine.damage() == f"the kernel changed its input {name} in place"


def test_rows_are_found_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_verify.placed._CHUNK", 64)
    view = torch.full((10, 5, 16), math.nan, dtype=torch.bfloat16)[..., :8]
    assert first_other_row(view, math.nan) is None
    view[9, 2, 7] = 1.0
    assert first_other_row(view, math.nan) == 9 * 5 + 2
    view[6, 4, 0] = 1.0
    assert first_other_row(view, math.nan) == 6 * 5 + 4


# Kernels that take something about memory for granted


def contiguous_like(tensor: Tensor) -> Tensor:
    """What a kernel reads that takes a tensor's rows to follow each other."""
    stand_in = torch.empty(tensor.shape, device="meta")
    return tensor.as_strided(tensor.shape, stand_in.stride())


class _Takes(Honest):
    """Reads one input as if it were contiguous."""

    tensor = ""

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        taken = {self.tensor: contiguous_like(getattr(inputs, self.tensor))}
        return EMULATED.run(replace(inputs, **taken))  # type: ignore[arg-type]


class TakesQNope(_Takes):
    name, tensor = "takes-q-nope", "q_nope"


class TakesQPe(_Takes):
    name, tensor = "takes-q-pe", "q_pe"


class TakesCkv(_Takes):
    name, tensor = "takes-ckv", "ckv_cache"


class TakesKpe(_Takes):
    name, tensor = "takes-kpe", "kpe_cache"


class ReadsPastRow(Honest):
    """Adds 0 times the element after each row of the pool, as a load in blocks that are too long does."""

    name = "reads-past-row"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        result = EMULATED.run(inputs)
        after = inputs.kpe_cache.as_strided((1,), (1,), inputs.kpe_cache.storage_offset() + 64)
        if inputs.kpe_cache.stride(-2) > 576:
            result.out.add_(0 * after)
        return result


class OtherSplits(Honest):
    """Right in any layout, by another order of sums where the query is transposed."""

    name = "other-splits"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        kernel = EMULATED if inputs.q_nope.is_contiguous() else replace(EMULATED, splits=1)
        return kernel.run(inputs)


def pool_rows(cache: Tensor, slots: Tensor, width: int, offset: int) -> Tensor:
    """Rows of a slice of a pool at `slots * stride + offset`, the offsets cut to what NEAR stands for 32 bits for."""
    at = (slots * cache.stride(-2)) & (NEAR["far32"] - 1)
    flat = cache.as_strided((cache.untyped_storage().nbytes() // cache.element_size(),), (1,), 0)
    return flat[at[:, None] + offset + torch.arange(width)]


class WrapsOffsets(Honest):
    """Computes offsets into the latent in 32 bits."""

    name = "wraps-offsets"
    contract = replace(Honest.contract, phases=("decode",))

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        ckv = torch.full(inputs.ckv_cache.shape, math.nan, dtype=inputs.ckv_cache.dtype)
        for b, kv_len in enumerate(inputs.kv_lens.tolist()):
            slots = slots_of(inputs.page_table, b, inputs.ckv_cache.shape[1], kv_len)
            ckv.flatten(0, 1)[slots] = pool_rows(inputs.ckv_cache, slots, 512, 0)
        return EMULATED.run(replace(inputs, ckv_cache=ckv))


class HonestWrite(Honest):
    name = "honest-write"
    contract = Contract("write", skips_out_of_range=True)

    def place_of(self, slots: Tensor) -> Tensor:
        return slots

    def run(self, inputs: WriteInputs, out: MLAOutput) -> object:  # type: ignore[override]
        rows = out.out.view(-1, out.out.shape[-1])
        inside = (inputs.slots >= 0) & (inputs.slots < len(rows))
        new = torch.cat([inputs.ckv, inputs.kpe], dim=-1)
        rows[self.place_of(inputs.slots[inside])] = new[inside]
        return out


class WrapsWrite(HonestWrite):
    """Cuts offsets to 32 bits."""

    name = "wraps-write"

    def place_of(self, slots: Tensor) -> Tensor:
        return ((slots * 576) % NEAR["far32"]) // 576


class WritesTwice(HonestWrite):
    """Right, and once more where a wrapped offset ends."""

    name = "writes-twice"

    def run(self, inputs: WriteInputs, out: MLAOutput) -> object:  # type: ignore[override]
        super().run(inputs, out)
        rows = out.out.view(-1, out.out.shape[-1])
        if len(rows) > 256:  # in a far one
            rows[5] = 1.0
        return out


class WritesAnotherCache(WritesTwice):
    """Returns a new cache, which is spoiled far from its slots."""

    name = "another-cache"

    def run(self, inputs: WriteInputs, out: MLAOutput) -> object:  # type: ignore[override]
        return super().run(inputs, MLAOutput(out.out.clone(), None))


def run_on(folder: Path, patch: pytest.MonkeyPatch, kernel: type[Honest], *ids: str) -> Run:
    register(patch, [kernel])
    return verify(folder, *cases(*ids))


def failed(run: Run) -> set[str]:
    return {check.name for c in run.only.comparisons for check in c.checks if not check.passed}


LAYOUT_CASES = [spec_of(DECODE, layout).id for layout in FORM_LAYOUTS["absorbed"]]


def test_an_honest_kernel_has_the_same_bits_in_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(tmp_path, monkeypatch, Honest, *LAYOUT_CASES)
    assert run.verdicts == [Verdict.PASS] * len(LAYOUT_CASES)
    names = [{check.name for c in r.comparisons for check in c.checks} for r in run.report.results]
    compared = [next(iter(found & {"cat_free", "layout"}), None) for found in names]
    assert compared == [None, "cat_free", "layout", "layout", "layout"]


@pytest.mark.parametrize("kernel", [TakesQNope, TakesQPe, TakesCkv, TakesKpe], ids=lambda k: k.name)
def test_a_kernel_that_takes_rows_to_follow_each_other_fails_on_slices(
    kernel: type[Honest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, kernel, spec_of(DECODE, "transposed").id, spec_of(DECODE, "split").id)
    assert run.verdicts == [Verdict.FAIL, Verdict.PASS]
    assert "contiguous, not transposed" in run.done.stdout


def test_a_kernel_that_reads_past_a_row_of_the_pool_meets_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(tmp_path, monkeypatch, ReadsPastRow, spec_of(DECODE, "transposed").id)
    assert run.verdicts == [Verdict.FAIL] and "nonfinite" in failed(run)


def test_another_order_of_sums_in_another_layout_fails_by_its_bits_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, OtherSplits, spec_of(DECODE, "transposed").id)
    assert failed(run) == {"layout"}
    assert "elements differ from those of the same tensors contiguous, not transposed" in run.done.stdout


def test_a_kernel_that_cuts_offsets_to_32_bits_fails_on_far_slots_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [spec_of(DECODE, layout).id for layout in ("far32", "split", "fused")]
    run = run_on(tmp_path, monkeypatch, WrapsOffsets, *ids)
    assert run.verdicts == [Verdict.FAIL, Verdict.PASS, Verdict.PASS]


def test_an_honest_write_into_a_far_cache_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [spec_of(WRITE.replace("rows", regime), layout).id for layout in FAR for regime in ("rows", "outside")]
    assert run_on(tmp_path, monkeypatch, HonestWrite, *ids).verdicts == [Verdict.PASS] * 4


def test_a_write_that_cuts_offsets_to_32_bits_fails_on_a_far_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, WrapsWrite, spec_of(WRITE, "far32").id, spec_of(WRITE, "split").id)
    assert run.verdicts == [Verdict.FAIL, Verdict.PASS]


@pytest.mark.parametrize("kernel", [WritesTwice, WritesAnotherCache], ids=lambda k: k.name)
def test_one_row_that_is_written_far_from_the_slots_fails(
    kernel: type[Honest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, kernel, spec_of(WRITE, "far31").id)
    assert run.verdicts == [Verdict.FAIL]
    assert run.only.reason == "the kernel wrote into slot 5 of the cache, which no token has"


def test_a_case_that_does_not_fit_into_memory_has_no_verdict_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_verify.memory.available", lambda: 100_000)
    run = run_on(tmp_path, monkeypatch, Honest, spec_of(DECODE, "far31").id, spec_of(DECODE, "split").id)
    assert (run.verdicts, run.exit_code) == ([Verdict.NOT_RUN, Verdict.PASS], 3)
    assert run.report.results[0].reason.startswith("out of memory: layout far31 takes 0.0 GB")


def test_a_kernel_that_takes_contiguous_tensors_runs_on_far_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strict(Honest):
        name = "strict"
        contract = replace(Honest.contract, strides="contiguous")

        def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
            assert all(tensor.is_contiguous() for tensor in inputs.named_tensors().values())
            return super().run(inputs, out)

    done = execute(Strict(), make_inputs(spec_of(DECODE, "split")), "bf16", "far31")
    assert done.verdict is None and done.output is not None


# In pytest


@pytest.mark.parametrize("template", [DECODE, WRITE])
@pytest.mark.parametrize("layout", ["split", "fused", *FAR])
def test_a_case_in_any_layout_can_be_asserted(template: str, layout: str) -> None:
    kernel = Honest() if template == DECODE else HonestWrite()
    case = MLACase(spec_of(template, layout), kernel.contract)
    assert_mla(kernel.run(case.inputs, case.output_buffers()), case)  # type: ignore[arg-type]


def test_an_assertion_notices_a_far_write_that_goes_elsewhere_too() -> None:
    case = MLACase(spec_of(WRITE, "far31"), HonestWrite.contract)
    with pytest.raises(AssertionError, match="wrote into slot 5 of the cache"):
        assert_mla(WritesTwice().run(case.inputs, case.output_buffers()), case)  # type: ignore[arg-type]
