from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_verify.cases import CaseSpec
from mla_verify.config import make_config, repeat_command
from mla_verify.errors import UsageError
from mla_verify.plan import Plan, build_plan
from mla_verify.suites import SUITES, SuiteCase, suite_cases
from tests.fakes import DECODE, MHA, PREFILL, Absorbed, Broken, Gone, MHAKernel, Other, register


@pytest.fixture(autouse=True)
def three_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Absorbed, Other, MHAKernel)


def pairs(plan: Plan) -> list[tuple[str, str]]:
    return [(entry.case_id, entry.kernel.name) for entry in plan.entries]


def plan_of(*cases: str, **flags: object) -> Plan:
    return build_plan(make_config(cases=cases, device="cpu", **flags))  # type: ignore[arg-type]


def test_a_case_is_planned_on_every_kernel_of_its_form_before_the_next_case() -> None:
    plan = plan_of(DECODE, MHA, PREFILL)
    assert pairs(plan) == [
        (DECODE, "absorbed"),
        (DECODE, "other"),
        (MHA, "mha"),
        (PREFILL, "absorbed"),
        (PREFILL, "other"),
    ]


def test_a_case_or_kernel_named_twice_is_planned_once() -> None:
    assert pairs(plan_of(DECODE, DECODE, kernels=["other", "other"])) == [(DECODE, "other")]


def test_the_default_suite_is_planned_whole_and_with_its_claims() -> None:
    plan = build_plan(make_config(device="cpu", kernels=["absorbed", "mha"]))
    kinds = {("absorbed", "decode"), ("absorbed", "prefill"), ("mha", "prefill")}  # of the two kernels' contracts
    dtypes = {"absorbed": Absorbed.contract.dtypes, "mha": MHAKernel.contract.dtypes}
    theirs = [
        case
        for case in suite_cases("smoke")
        if (case.spec.form, case.spec.phase) in kinds and case.spec.dtype in dtypes[case.spec.form]
    ]
    assert {(e.case_id, e.claim) for e in plan.entries} == {(c.spec.id, c.claim) for c in theirs}


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_plans_something_for_the_kernels_that_run_everywhere(
    suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    plan = build_plan(make_config(suite=suite, device="cpu"))
    assert {kernel for _, kernel in pairs(plan)} >= {"torch-absorbed", "torch-mha"}


def test_dtype_keeps_only_cases_of_that_dtype() -> None:
    assert {case for case, _ in pairs(plan_of(DECODE, PREFILL, dtypes=["bf16"]))} == {PREFILL}


def test_seed_replaces_the_seed_of_every_case_and_cases_that_become_one_are_planned_once() -> None:
    first, second = DECODE, DECODE.replace("-s7", "-s8")
    assert pairs(plan_of(first, second, seed=3, kernels=["other"])) == [(DECODE.replace("-s7", "-s3"), "other")]


def test_a_case_of_a_suite_keeps_its_claim_and_one_of_no_suite_says_so() -> None:
    known = suite_cases("smoke")[0]
    entries = plan_of(known.spec.id, DECODE, kernels=["absorbed"]).entries
    assert [entry.claim for entry in entries] == [known.claim, "named on the command line, in no suite"]


def test_an_inputs_file_is_one_case_for_the_kernels_of_its_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "layer 3.safetensors"
    path.touch()
    case = SimpleNamespace(spec_id="file-layer-3", form="absorbed", dtype="bf16", phase="prefill")
    monkeypatch.setattr("mla_verify.inputs_file.read_inputs_file", {path: case}.__getitem__)
    plan = build_plan(make_config(inputs=path, device="cpu"))
    assert pairs(plan) == [("file-layer-3", "absorbed"), ("file-layer-3", "other")]
    assert all(entry.spec is None and "layer 3.safetensors" in entry.claim for entry in plan.entries)
    assert plan.named_cases == ("file-layer-3",)
    assert repeat_command("other", "file-layer-3", "cpu", path).endswith(f"--inputs '{path}' --device cpu")


@pytest.mark.parametrize(
    ("cases", "flags", "message", "hint"),
    [
        (
            [DECODE],
            {"kernels": ["mha"]},
            "mha takes form mha, and the selected cases have form absorbed",
            "absorbed, o",
        ),
        ([DECODE], {"dtypes": ["fp16"]}, "no selected case has dtype fp16", "fp32"),
    ],
)
def test_a_selection_that_leaves_nothing_names_what_to_change(
    cases: list[str], flags: dict[str, object], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(*cases, **flags)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_without_any_available_kernel_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Gone)
    with pytest.raises(UsageError, match="no kernel is available on cpu"):
        plan_of(DECODE)


def test_an_unavailable_kernel_that_nobody_named_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Absorbed, Gone)
    plan = plan_of(DECODE)
    assert pairs(plan) == [(DECODE, "absorbed")]
    assert plan.unavailable == {"gone": "gonelib is not installed on cpu"}
    assert plan.notes() == ("note: gone left out, unavailable here: gonelib is not installed on cpu",)


def test_an_unavailable_kernel_that_was_named_is_planned_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Absorbed, Gone)
    plan = plan_of(DECODE, kernels=["gone"])
    assert pairs(plan) == [(DECODE, "gone")]
    assert plan.notes()[0].startswith("warning: gone is unavailable here, its cases are UNSUPPORTED: gonelib")


def test_requiring_a_kernel_adds_it_and_takes_no_other_away(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Absorbed, Other, Gone)
    plan = plan_of(DECODE, required=["gone"])
    assert pairs(plan) == [(DECODE, "absorbed"), (DECODE, "other"), (DECODE, "gone")]
    assert plan.notes()[0].startswith("warning: gone is required and unavailable here: gonelib is not installed")
    assert pairs(plan_of(DECODE, kernels=["other"], required=["gone"])) == [(DECODE, "other"), (DECODE, "gone")]


def test_a_kernel_whose_library_breaks_on_import_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Broken, Absorbed)
    plan = plan_of(DECODE)
    assert pairs(plan) == [(DECODE, "absorbed")]
    assert "OSError: libbroken.so: undefined symbol" in plan.unavailable["broken"]


def test_a_named_kernel_of_another_form_than_all_cases_is_pointed_out() -> None:
    plan = plan_of(DECODE, kernels=["absorbed", "mha"])
    assert pairs(plan) == [(DECODE, "absorbed")]
    assert plan.notes() == ("note: no selected case is of mha's kind: form mha, phase prefill",)


@pytest.mark.parametrize(
    ("flags", "claims"),
    [
        ({"suite": "smoke"}, "decode prefill fp32 bf16"),
        ({"suite": "smoke", "dtypes": ["bf16", "fp16"]}, "decode prefill bf16"),
        ({"cases": [DECODE]}, "decode fp32"),
        ({"cases": [DECODE, PREFILL], "dtypes": ["bf16"]}, "prefill bf16"),
        # fp16 is no claim of this kernel's: planning it makes it none.
        ({"cases": [DECODE, DECODE.replace("fp32", "fp16")]}, "decode fp32"),
    ],
)
def test_a_run_has_to_decide_what_a_kernel_claims_within_what_was_selected(
    flags: dict[str, object], claims: str
) -> None:
    plan = build_plan(make_config(device="cpu", kernels=["absorbed"], **flags))  # type: ignore[arg-type]
    assert [value for _, value in plan.claims["absorbed"]] == claims.split()


def test_a_suite_without_a_case_of_a_claim_does_not_take_the_claim_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_verify.plan.suite_cases", lambda name: (SuiteCase(CaseSpec.parse(DECODE), "a claim"),))
    plan = build_plan(make_config(suite="smoke", device="cpu", kernels=["absorbed"]))
    assert pairs(plan) == [(DECODE, "absorbed")]
    assert [value for _, value in plan.claims["absorbed"]] == ["decode", "prefill", "fp32", "bf16"]


def test_a_suite_without_a_case_of_the_kernels_dtype_is_a_usage_error_that_names_it() -> None:
    with pytest.raises(UsageError, match="mha takes dtype fp32, which no selected case has"):
        build_plan(make_config(suite="smoke", kernels=["mha"], dtypes=["bf16"], device="cpu"))
