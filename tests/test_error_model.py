"""The error model accepts honest kernels and rejects wrong ones; each of its checks finds what the others do not."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.honest import honest_run
from mla_verify.cases import REGIMES, CaseSpec
from mla_verify.compare import compare_output, wrong_shape
from mla_verify.emulate import EmulatedKernel
from mla_verify.errors import UsageError
from mla_verify.expected import Expected, dense_request, expect
from mla_verify.formats import DTYPES, FORMATS
from mla_verify.inputs import make_inputs
from mla_verify.kernels.contract import Contract, RoundingFacts
from mla_verify.results import Comparison
from mla_verify.tensors import MLAInputs, MLAOutput

# From least to most rounding: P in fp32, P rounded, partial outputs rounded too.
KERNELS = {
    "precise": EmulatedKernel(rounds_p=False),
    "rounded": EmulatedKernel(rounds_p=True),
    "split": EmulatedKernel(splits=8, tile=32, rounds_p=True, rowsum="rounded", rounds_partials=True),
}


@cache
def setting(case: str) -> tuple[MLAInputs, dict[str, MLAOutput], Expected]:
    """Inputs, every kernel's honest output, and the reference, once for all tests of a case."""
    spec = CaseSpec.parse(case)
    inputs = make_inputs(spec)
    outputs = {name: kernel.run(inputs) for name, kernel in KERNELS.items()}
    return inputs, outputs, expect(inputs, [kernel.facts(spec.dtype) for kernel in KERNELS.values()])


def judged(case: str, kernel: str) -> tuple[MLAInputs, MLAOutput, Expected, RoundingFacts]:
    inputs, outputs, expected = setting(case)
    return inputs, outputs[kernel], expected, KERNELS[kernel].facts(CaseSpec.parse(case).dtype)


def decode(dtype: str, regime: str, kv_len: int = 4096) -> str:
    return f"decode-absorbed-h16-q1.kv{kv_len}-p64-{dtype}-{regime}-s0"


def failed(comparisons: tuple[Comparison, ...]) -> set[str]:
    return {f"{c.tensor} {check.name}" for c in comparisons for check in c.checks if not check.passed}


def verdict(case: str, kernel: str, out: torch.Tensor | None = None, lse: torch.Tensor | None = None) -> set[str]:
    """The checks that fail when the kernel's own results are replaced by these."""
    inputs, output, expected, facts = judged(case, kernel)
    changed = MLAOutput(output.out if out is None else out.to(output.out.dtype), output.lse if lse is None else lse)
    return failed(compare_output(changed, expected, facts, inputs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_runs_are_accepted_and_their_errors_are_as_large_as_predicted(dtype: str) -> None:
    # A sample of the 2,000 runs that docs/error-model.md reports.
    squares = defaultdict(list)
    for number in range(36):
        run = honest_run(number, dtype, max_keys=2500)
        assert not failed(run.comparisons), f"{run.spec.id} on {run.kernel}"
        squares[run.spec.regime].append(run.comparisons[0].rms_z ** 2)
    rms = {regime: math.sqrt(sum(s) / len(s)) for regime, s in squares.items()}
    assert set(rms) == set(REGIMES)
    # The band of the 2,000 runs is 0.35 to 1.1; four runs a regime scatter around it.
    # peaked: one key has all the mass, and the honest output is the value itself, without an error.
    assert rms.pop("peaked") < 0.05
    assert all(0.28 <= value <= 1.1 for value in rms.values()), rms


# Runs that an earlier form of the model called wrong, and why.
@pytest.mark.parametrize(
    ("number", "dtype", "why"),
    [
        (19, "fp16", "partial outputs that are near 0 for equal parts, and not for the kernel's"),
        (34, "bf16", "the same, on bf16"),
        (168, "bf16", "a light part's share lost when the heavy part was rounded before the merge: slope 4.97"),
        (57, "bf16", "the same, with 8 splits"),
        (375, "bf16", "a part's output that is one value but for a share of u / 3, lost when it is stored: slope 6.65"),
        (606, "fp32", "tiles too light to change a sum of 4.6: max_z 7.6"),
        (1845, "fp32", "weights of parts of 3 keys, from LSEs in fp32: max_z 7.2"),
    ],
)
def test_honest_runs_that_once_raised_an_alarm_are_accepted(number: int, dtype: str, why: str) -> None:
    run = honest_run(number, dtype)
    assert not failed(run.comparisons), why
    assert next(check.value for check in run.comparisons[0].checks if check.name == "slope") < 3.5, why


def test_a_needle_case_whose_values_lie_on_ties_is_accepted() -> None:
    # torch's attention, bf16: one element changed its rounding, which once made slope 7.1.
    from mla_verify.kernels import load_kernel
    from mla_verify.tensors import output_buffers

    inputs = make_inputs(CaseSpec.parse("decode-absorbed-h16-q1.kv257+q1.kv256-p128-bf16-needle-s0"))
    kernel = load_kernel("torch-absorbed")
    facts = kernel.contract.facts("bf16")
    output = kernel.run(inputs, output_buffers(inputs, torch.bfloat16).output)
    assert not failed(compare_output(output, expect(inputs, [facts]), facts, inputs))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("regime", ["uniform", "needle", "normal", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_a_constant_and_another_rows_output_are_rejected(dtype: str, regime: str, kernel: str) -> None:
    case = decode(dtype, regime)
    out = judged(case, kernel)[1].out
    assert not verdict(case, kernel)
    assert verdict(case, kernel, torch.zeros_like(out))
    assert verdict(case, kernel, torch.full_like(out, float(out.float().mean())))
    if regime != "uniform":  # there all heads of a request have one output
        assert verdict(case, kernel, out.roll(1, dims=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_requests_output_is_rejected_where_all_heads_are_alike(dtype: str) -> None:
    case = f"decode-absorbed-h8-2xq1.kv1000-p64-{dtype}-uniform-s0"
    assert verdict(case, "rounded", judged(case, "rounded")[1].out.roll(1, dims=0))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.005, 0.995])
def test_a_scale_off_by_half_a_percent_is_rejected(dtype: str, regime: str, kernel: str, scale: float) -> None:
    case = decode(dtype, regime)
    assert "out slope" in verdict(case, kernel, judged(case, kernel)[1].out.double() * scale)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("regime", ["uniform", "needle"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lost_last_key_among_4096_is_rejected(dtype: str, regime: str, kernel: str) -> None:
    case = decode(dtype, regime)
    r = dense_request(judged(case, kernel)[0], 0)
    lost = replace(r, k=tuple(k[:-1] for k in r.k)).attend()
    assert "out max_z" in verdict(case, kernel, lost.out, judged(case, kernel)[1].lse)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_lse_in_base_2_is_rejected(dtype: str, kernel: str) -> None:
    case = decode(dtype, "normal")
    lse = judged(case, kernel)[1].lse
    assert lse is not None
    assert verdict(case, kernel, lse=lse * math.log2(math.e)) == {"lse max_z"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_nonfinite_element_is_rejected_by_the_nonfinite_check_alone(bad: float) -> None:
    case = decode("bf16", "normal")
    out, lse = (t.clone() for t in (judged(case, "rounded")[1].out, judged(case, "rounded")[1].lse) if t is not None)
    out[0, 3, 5] = bad
    assert verdict(case, "rounded", out) == {"out nonfinite"}
    lse[0, 3] = bad
    assert verdict(case, "rounded", lse=lse) == {"lse nonfinite"}


def test_one_wrong_element_is_rejected_by_max_z_alone() -> None:
    case = decode("bf16", "normal")
    inputs, output, expected, facts = judged(case, "rounded")
    out = output.out.double().clone()
    out[0, 3, 5] = expected.attention.out[0, 3, 5] + 9 * expected.noise[facts].out[0, 3, 5].sqrt()
    assert verdict(case, "rounded", out) == {"out max_z"}


@pytest.mark.parametrize("regime", ["normal", "nope"])
def test_an_undeclared_rounding_is_rejected_by_rms_z_alone(regime: str) -> None:
    # The kernel stores its partial outputs in bf16; it is judged by the facts of one that keeps them in fp32.
    inputs, _, expected, facts = judged(decode("bf16", regime, kv_len=1000), "rounded")
    output = EmulatedKernel(splits=8, tile=32, rounds_partials=True).run(inputs)
    assert failed(compare_output(output, expected, facts, inputs)) == {"out rms_z"}


def test_a_small_scale_error_is_rejected_by_slope_alone() -> None:
    case = decode("bf16", "normal")
    assert verdict(case, "rounded", judged(case, "rounded")[2].attention.out * 1.003) == {"out slope"}


@pytest.mark.parametrize(("error", "accepted"), [(2.0**-24, True), (-(2.0**-24), True), (2.0**-18, False)])
def test_many_rows_do_not_hold_a_kernel_to_a_finer_sm_scale_than_fp32_has(error: float, accepted: bool) -> None:
    # 1,500 rows pin a head's slope to a hundredth of u; what an fp32 factor does to all of them alike is no fault.
    inputs = make_inputs(CaseSpec.parse("prefill-mha-h4-q1500.kv1500-ragged-fp32-normal-s0"))
    facts = RoundingFacts(out_dtype="fp32")
    r = dense_request(inputs, 0)
    out = replace(r, sm_scale=r.sm_scale * (1 + error)).attend().out.float()
    checks = compare_output(MLAOutput(out, None), expect(inputs, [facts]), facts, inputs)[0].checks
    slope = next(check for check in checks if check.name == "slope")
    assert slope.passed == accepted, slope


def test_an_empty_row_must_be_zero_with_lse_minus_infinity() -> None:
    case = "mixed-absorbed-h8-q1.kv33+q1.kv0+q3.kv2-p64-bf16-normal-s0"
    _, output, expected, _ = judged(case, "rounded")
    assert expected.attention.num_keys.tolist() == [33, 0, 0, 1, 2]
    assert not verdict(case, "rounded")
    out, lse = output.out.clone(), output.lse
    out[1, 2, 3] = FORMATS["bf16"].min_subnormal * 16
    assert "out max_z" in verdict(case, "rounded", out)
    assert lse is not None
    for wrong in (math.inf, 0.0, -1e30):
        changed = lse.clone()
        changed[1] = wrong
        assert verdict(case, "rounded", lse=changed) == {"lse nonfinite"}


def test_a_result_that_is_not_a_plain_tensor_is_named() -> None:
    inputs, output, _, facts = judged(decode("bf16", "normal", kv_len=1000), "rounded")
    contract = Contract(facts=lambda dtype: facts, returns_lse=True)
    wrong = wrong_shape(MLAOutput(output.out.to_sparse(), output.lse), inputs, "bf16", contract)
    assert wrong == "out has layout torch.sparse_coo, it must be torch.strided"


@pytest.mark.filterwarnings("error")
def test_a_result_that_requires_grad_is_judged_like_any_other() -> None:
    inputs, output, expected, facts = judged(decode("bf16", "normal", kv_len=1000), "rounded")
    assert output.lse is not None
    grad = MLAOutput(output.out.clone().requires_grad_(), output.lse.clone().requires_grad_())
    assert not failed(compare_output(grad, expected, facts, inputs))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("absorbed", name) for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")),
        *(("mha", name) for name in ("q", "k", "v")),
    ],
)
def test_inputs_that_are_not_finite_are_refused_by_name(form: str, name: str, bad: float) -> None:
    inputs = make_inputs(
        CaseSpec.parse(f"decode-{form}-h4-q1.kv64+q1.kv64-{'ragged' if form == 'mha' else 'p64'}-bf16-normal-s0")
    )
    tensor = getattr(inputs, name).clone()
    at = (int(inputs.page_table[1, 0]), 3) if name.endswith("cache") else (-1, 2)
    tensor[at] = bad
    with pytest.raises(UsageError) as error:
        expect(replace(inputs, **{name: tensor}), [RoundingFacts("bf16")])
    assert error.value.message == f"{name} holds NaN or infinity where request 1 reads it, so that no output is right"


def test_the_recorded_evidence_says_what_the_docs_claim() -> None:
    rows = json.loads((Path(__file__).parents[1] / "docs" / "evidence" / "error-model.json").read_text())["regimes"]
    assert {(row["dtype"], row["regime"]) for row in rows} == {(d, r) for d in DTYPES for r in REGIMES}
    for dtype in DTYPES:
        assert sum(row["runs"] for row in rows if row["dtype"] == dtype) >= 2000
    assert sum(row["false_alarms"] for row in rows) == 0
    for row in rows:
        # docs/error-model.md says why: in peaked the honest output has no error.
        assert 0.35 <= row["out_rms_z"] <= 1.1 or row["regime"] == "peaked", row
