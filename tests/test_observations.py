"""Extra calls: do bits repeat, is a request the same alone? Told of every kernel, held against claims."""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_verify import observations
from mla_verify.calls import Job
from mla_verify.cases import CaseSpec
from mla_verify.emulate import EmulatedKernel
from mla_verify.errors import FallbackError
from mla_verify.execute import Execution
from mla_verify.expected import expect
from mla_verify.inputs import alone, make_inputs
from mla_verify.observations import differing, some_requests
from mla_verify.report.json_report import read_json
from mla_verify.report.text import bits_lines
from mla_verify.results import CaseResult, Planned, RunReport, Verdict
from mla_verify.tensors import AbsorbedInputs, LayerInputs, MHAInputs, MLAOutput
from tests.fakes import result
from tests.kernels_helper import DECODE, MHA, SINGLE, Run, cases, register, verify
from tests.wrong_kernels import EMULATED, Honest, HonestMHA

# Its first live request is 0, the middle one 3, the last one 5.
GAPS = "mixed-absorbed-h4-q2.kv70+q0.kv20+q1.kv0+q1.kv33+q0.kv0+q3.kv40-p16-bf16-normal-s7"
BOTH = {"repeats": True, "batch_invariant": True}
PASS, FAIL = Verdict.PASS, Verdict.FAIL


class Unsteady(Honest):
    """Each call moves another element by one unit in the last place, as a race does."""

    name = "unsteady"
    calls = 0

    def wrong_out(self, out: Tensor) -> Tensor:
        type(self).calls += 1
        out.view(torch.int16)[0, 0, type(self).calls % 4] += 1
        return out


class UnsteadyLSE(Honest):
    name = "unsteady-lse"
    calls = 0

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        type(self).calls += 1
        assert result.lse is not None
        result.lse.view(torch.int32)[0, 0] += type(self).calls % 2
        return result


class SplitsByBatch(Honest):
    """More splits for a batch of one: right, and never the same."""

    name = "splits-by-batch"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        return EmulatedKernel(splits=2 if inputs.num_requests > 1 else 1, tile=32).run(inputs)


class LastAlone(SplitsByBatch):
    """Other bits for the last request alone: it is the one with 201 keys."""

    name = "last-alone"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        return EmulatedKernel(splits=1 if inputs.kv_lens.tolist() == [201] else 2, tile=32).run(inputs)


class RaisesAlone(Honest):
    name = "raises-alone"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        if inputs.num_requests == 1:
            raise NotImplementedError("batches only")
        return EMULATED.run(inputs)


class RaisesAgain(Honest):
    name = "raises-again"
    calls = 0

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        type(self).calls += 1
        if type(self).calls > 1:
            raise RuntimeError("the plan is used up")
        return EMULATED.run(inputs)


class RefusesAlone(Honest):
    name = "refuses-alone"

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        return "a single request" if len(spec.requests) == 1 else None


class SameMemory(Honest):
    """Returns the memory that it has returned before, filled anew."""

    name = "same-memory"
    memory: dict[torch.Size, Tensor] = {}  # noqa: RUF012

    def wrong_out(self, out: Tensor) -> Tensor:
        return self.memory.setdefault(out.shape, torch.empty_like(out)).copy_(out)


class AnyEmptyRow(Honest):
    """What a query without keys gets differs from call to call, and nobody reads it."""

    name = "any-empty-row"
    contract = replace(Honest.contract, empty_out="any", empty_lse="any")

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        assert result.lse is not None
        empty = result.lse.isneginf()
        result.out[empty], result.lse[empty] = torch.rand(()).bfloat16(), torch.rand(())
        return result


class Damages(Honest):
    name = "damages"
    calls = 0

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        type(self).calls += 1
        inputs.q_pe.zero_()
        return EMULATED.run(inputs)


class FallsBack(Honest):
    name = "falls-back"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        raise FallbackError("asked for fa3, fa2 ran")


class NeedsDecode(Honest):
    """Asked about a request of a mixed batch alone, it wants a phase that such a case can have."""

    name = "needs-decode"
    asked: list[str] = []  # noqa: RUF012

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        self.asked.append(spec.id)
        return None


@pytest.fixture(autouse=True)
def counters_start_at_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (Unsteady, UnsteadyLSE, RaisesAgain, Damages):
        monkeypatch.setattr(kernel, "calls", 0)


def run_on(folder: Path, patch: pytest.MonkeyPatch, kernel: type[Honest], *ids: str, **claims: bool) -> Run:
    """The kernel as it is, with these claims in its contract."""
    patch.setattr(kernel, "contract", replace(kernel.contract, **claims))
    register(patch, [kernel])
    return verify(folder, *cases(*ids))


def claims_of(result: CaseResult) -> dict[str, tuple[float, str]]:
    return {
        check.name: (check.value, check.detail)
        for comparison in result.comparisons
        for check in comparison.checks
        if check.name in ("repeats", "batch_invariant")
    }


# Measured


@pytest.mark.parametrize("case", [DECODE, GAPS])
def test_an_honest_kernel_is_seen_to_repeat_and_to_be_batch_invariant(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, Honest, case)
    assert (run.verdicts, run.only.observed) == ([PASS], BOTH)
    assert run.only.seconds["again"] > 0
    assert claims_of(run.only) == {}  # no claim, no check
    assert "bits of honest: repeat 1 of 1, alone as in a batch 1 of 1\n" in run.done.stdout


def test_the_non_absorbed_form_is_observed_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_on(tmp_path, monkeypatch, HonestMHA, MHA).only.observed == BOTH


@pytest.mark.parametrize("kernel", [Unsteady, UnsteadyLSE], ids=lambda k: k.name)
def test_a_kernel_that_does_not_repeat_its_bits_is_told_of_and_passes(
    kernel: type[Honest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, kernel, SINGLE)
    assert (run.verdicts, run.only.observed) == ([PASS], {"repeats": False})
    assert f"bits of {kernel.name}: repeat 0 of 1\n" in run.done.stdout


def test_a_kernel_that_does_not_repeat_its_bits_is_not_held_to_them_in_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, Unsteady, SINGLE.replace("-s7", "-fused-s7"))
    assert run.verdicts == [PASS]
    assert "cat_free" not in {check.name for c in run.only.comparisons for check in c.checks}


@pytest.mark.parametrize("kernel", [SplitsByBatch, LastAlone], ids=lambda k: k.name)
def test_a_kernel_whose_bits_depend_on_the_batch_is_told_of_and_passes(
    kernel: type[Honest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, kernel, DECODE)
    assert (run.verdicts, run.only.observed) == ([PASS], {"repeats": True, "batch_invariant": False})


def test_rows_that_the_contract_leaves_open_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = "decode-absorbed-h4-q1.kv70+q1.kv0+q1.kv33-p16-bf16-normal-s7"
    run = run_on(tmp_path, monkeypatch, AnyEmptyRow, case, repeats=True)
    assert (run.verdicts, run.only.observed) == ([PASS], BOTH)


def test_a_kernel_that_returns_the_same_memory_each_time_keeps_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, SameMemory, DECODE, DECODE.replace("-s7", "-fused-s7"))
    assert run.verdicts == [PASS, PASS]
    assert run.report.results[0].observed == BOTH


# Not observed


def test_a_kernel_that_refuses_a_request_alone_keeps_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, RefusesAlone, DECODE)
    assert (run.verdicts, run.only.observed) == ([PASS], {"repeats": True})


@pytest.mark.parametrize(
    ("kernel", "check", "detail"),
    [
        (
            RaisesAgain,
            "repeats",
            "when the same call is made again: the kernel raised RuntimeError: the plan",
        ),
        (
            RaisesAlone,
            "batch_invariant",
            "when a request is alone: the kernel raised NotImplementedError: batches",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, type) else "",
)
def test_a_kernel_that_raises_in_an_extra_call_fails_the_case_without_a_claim(
    kernel: type[Honest], check: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, kernel, DECODE)
    assert run.verdicts == [FAIL]
    assert claims_of(run.only)[check][0] == 1
    assert detail in claims_of(run.only)[check][1]


def test_an_error_of_ours_in_an_extra_call_costs_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(observations, "execute_job", fails)
    run = run_on(tmp_path, monkeypatch, Honest, DECODE)
    assert (run.verdicts, run.only.observed) == ([PASS], {})
    assert (run.only.reason, run.only.tool_error) == ("", False)


@pytest.fixture
def processes_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU kernels of a file run where Triton would be interpreted."""
    monkeypatch.setattr(observations, "_INTERPRETER", "NO_SUCH_VARIABLE")


@pytest.mark.usefixtures("processes_are_observed")
def test_a_kernel_that_takes_its_process_down_when_it_is_called_again_fails_the_case(tmp_path: Path) -> None:
    text = """
        import os
        from mla_verify.emulate import EmulatedKernel
        from mla_verify.kernels import Contract, mla_kernel

        EMULATED = EmulatedKernel()
        calls = 0

        @mla_kernel(Contract(facts=EMULATED.facts))
        def again(inputs, out):
            global calls
            calls += 1
            if calls > 1:
                os.abort()
            result = EMULATED.run(inputs)
            return type(result)(result.out, None)
    """
    (tmp_path / "again.py").write_text(textwrap.dedent(text))
    run = verify(tmp_path, "--kernel", f"{tmp_path / 'again.py'}:again", *cases(DECODE))
    assert run.verdicts == [FAIL]
    assert "when the same call is made again: the kernel's process ended: killed by SIGABRT" in run.only.reason


@pytest.mark.usefixtures("processes_are_observed")
def test_a_kernel_in_a_process_of_its_own_is_observed_there(tmp_path: Path) -> None:
    kernel = Path(__file__).parent / "own_kernels/conventions.py"
    assert verify(tmp_path, "--kernel", f"{kernel}:base2_heads_first", *cases(GAPS)).only.observed == BOTH


def test_large_cases_and_those_of_another_layout_are_called_for_a_verdict_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observations, "MAX_SCORES", 8 * 501 - 1)  # of DECODE one less than it has
    run = run_on(tmp_path, monkeypatch, Honest, DECODE, SINGLE, SINGLE.replace("-s7", "-fused-s7"))
    assert [result.observed for result in run.report.results] == [{}, {"repeats": True}, {}]


def test_a_kernel_that_has_broken_a_rule_is_not_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(tmp_path, monkeypatch, Damages, DECODE)
    assert (run.verdicts, run.only.observed, Damages.calls) == ([FAIL], {}, 1)


def test_the_interpreter_of_triton_is_called_again_for_a_claim_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interpreted(Honest):
        def own_process(self, device: str) -> dict[str, str]:
            return {"TRITON_INTERPRET": "1"}

    spec, kernel = CaseSpec.parse(SINGLE), Interpreted()
    output = EMULATED.run(make_inputs(spec))  # type: ignore[arg-type]
    again = Execution(EMULATED.run(make_inputs(spec)))  # type: ignore[arg-type]
    monkeypatch.setattr(observations, "execute_job", lambda *_: again)
    job = Job(spec, None, spec.dtype, "cpu", "split")
    assert observations.observe(kernel, job, None, output).observed == {}  # type: ignore[arg-type]
    kernel.contract = replace(kernel.contract, repeats=True)
    assert observations.observe(kernel, job, None, output).observed == {"repeats": True}  # type: ignore[arg-type]


# Claimed


def test_claims_that_hold_are_checks_that_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(tmp_path, monkeypatch, Honest, DECODE, repeats=True, batch_invariant=True)
    assert run.verdicts == [PASS]
    assert claims_of(run.only) == {"repeats": (0.0, "none"), "batch_invariant": (0.0, "none")}


@pytest.mark.parametrize(
    ("kernel", "case", "claim", "detail"),
    [
        (Unsteady, SINGLE, "repeats", "elements have other bits when the same call is made again"),
        (UnsteadyLSE, SINGLE, "repeats", "elements have other bits when the same call is made again"),
        (SplitsByBatch, DECODE, "batch_invariant", "elements have other bits when a request is alone"),
        (LastAlone, DECODE, "batch_invariant", "elements have other bits when a request is alone"),
        (RaisesAgain, SINGLE, "repeats", "the plan is used up"),
        (RaisesAlone, DECODE, "batch_invariant", "batches only"),
    ],
    ids=lambda value: value.name if isinstance(value, type) else "",
)
def test_a_claim_that_does_not_hold_fails_the_case(
    kernel: type[Honest], case: str, claim: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, kernel, case, **{claim: True})
    assert run.verdicts == [FAIL]
    found = claims_of(run.only)
    assert list(found) == [claim] and found[claim][0] >= 1 and detail in found[claim][1]
    assert claim in run.only.reason and detail in run.done.stdout


def test_a_request_that_a_kernel_refuses_alone_breaks_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(tmp_path, monkeypatch, RefusesAlone, DECODE, batch_invariant=True)
    assert (run.verdicts, claims_of(run.only)) == ([PASS], {})


# Requests alone


def test_the_first_the_middle_and_the_last_request_with_queries_and_keys_are_chosen() -> None:
    assert some_requests(CaseSpec.parse(GAPS)) == [0, 3, 5]
    assert some_requests(CaseSpec.parse(DECODE)) == [0, 1]
    assert some_requests(CaseSpec.parse(SINGLE)) == []
    assert some_requests(CaseSpec.parse("mixed-absorbed-h8-q2.kv0+q1.kv9-p64-bf16-normal-s0")) == []


FORMS = [GAPS, GAPS.replace("absorbed", "mha").replace("p16", "ragged"), GAPS.replace("absorbed", "layer")]


@pytest.mark.parametrize("case", FORMS, ids=["absorbed", "mha", "layer"])
def test_a_request_alone_has_the_result_that_it_has_among_others(case: str) -> None:
    inputs = make_inputs(CaseSpec.parse(case))
    assert isinstance(inputs, AbsorbedInputs | MHAInputs | LayerInputs)
    facts = EMULATED.facts("bf16")
    if isinstance(inputs, LayerInputs):
        mine = alone(inputs, 5)
        assert isinstance(mine, LayerInputs) and mine.q_nope.shape[0] == 3 and mine.w_kc is inputs.w_kc
        return
    whole = expect(inputs, [facts]).attention
    for request in range(inputs.num_requests):
        start, end = inputs.q_range(request)
        mine = alone(inputs, request)
        assert isinstance(mine, AbsorbedInputs | MHAInputs)
        assert (mine.num_requests, mine.q_range(0)) == (1, (0, end - start))
        if end > start:
            part = expect(mine, [facts]).attention
            assert torch.equal(part.out, whole.out[start:end]) and torch.equal(part.lse, whole.lse[start:end])


def test_a_kernel_is_asked_about_a_request_alone_as_the_case_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NeedsDecode, "asked", [])
    run_on(tmp_path, monkeypatch, NeedsDecode, GAPS)
    whole, end = GAPS, "p16-bf16-normal-s7"
    single = [f"prefix-absorbed-h4-q2.kv70-{end}", f"decode-absorbed-h4-q1.kv33-{end}"]
    assert NeedsDecode.asked == [whole, whole, *single, f"prefix-absorbed-h4-q3.kv40-{end}"]


# Bits


def test_bits_differ_where_numbers_are_equal_and_nan_is_like_nan() -> None:
    a = torch.tensor([[[0.0, 1.0, math.nan, math.nan]]], dtype=torch.bfloat16)
    b = torch.tensor([[[-0.0, 1.0, math.nan, 2.0]]], dtype=torch.bfloat16)
    b.view(torch.int16)[0, 0, 2] += 1  # another NaN
    lse = torch.tensor([[math.inf]])
    assert differing(MLAOutput(a, None), MLAOutput(b, None)) == 2
    assert differing(MLAOutput(a, lse), MLAOutput(a, -lse)) == 1
    assert differing(MLAOutput(a, lse), MLAOutput(a, lse.clone())) == 0


def test_the_terminal_counts_the_cases_of_each_kernel() -> None:
    results = (
        result(observed=BOTH),
        result(case=SINGLE, observed={"repeats": False}),
        result(kernel="other", observed={"repeats": True, "batch_invariant": False}),
        result(kernel="third"),
    )
    plan = tuple(Planned(r.case, r.kernel) for r in results)
    assert bits_lines(RunReport(plan, results, {}, "pass", 0, ())) == [
        "bits of absorbed: repeat 1 of 2, alone as in a batch 1 of 1",
        "bits of other: repeat 1 of 1, alone as in a batch 0 of 1",
        "",
    ]


def test_the_json_report_has_what_was_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(tmp_path, monkeypatch, Honest, DECODE)
    assert (
        '"observed": {\n    "repeats": true,\n    "batch_invariant": true\n   }'
        in (tmp_path / "report.json").read_text()
    )
    assert read_json(tmp_path / "report.json").results[0].observed == BOTH


# Another kernel than the one asked for


def test_a_library_that_ran_another_kernel_fails_the_case_in_its_adapter_s_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(tmp_path, monkeypatch, FallsBack, DECODE)
    assert (run.verdicts, run.exit_code) == ([FAIL], 1)
    assert (run.only.reason, run.only.traceback) == ("asked for fa3, fa2 ran", "")
    assert "reason  asked for fa3, fa2 ran\n" in run.done.stdout
