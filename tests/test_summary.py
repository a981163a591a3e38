"""The summary of a run counts what its table holds, and a summary that says otherwise is refused."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mla_verify.cases import CaseSpec
from mla_verify.config import make_config
from mla_verify.decision import decide
from mla_verify.environment import package_hash
from mla_verify.errors import UsageError
from mla_verify.inputs import make_inputs
from mla_verify.kernels.contract import Contract, Kernel
from mla_verify.plan import Plan, build_plan
from mla_verify.report.summary import Summary, render, to_summary
from mla_verify.report.summary_kernels import KernelFacts
from mla_verify.report.summary_merge import merge_summaries
from mla_verify.report.summary_read import read_summary
from mla_verify.report.summary_table import Pair
from mla_verify.results import CaseResult, Planned, RunReport, Verdict
from mla_verify.tensors import output_buffers
from tests import failing_kernels as failing
from tests import wrong_kernels as wrong
from tests.cli_helper import invoke
from tests.fakes import DECODE, PREFILL, Absorbed, Gone, Other, comparison, register
from tests.fakes import result as fake_result
from tests.kernels_helper import RAGGED, cases, verify
from tests.kernels_helper import register as register_kernels
from tools.merge_evidence import hash_of_commit, merge

ENVIRONMENT = {"argv": ["mla-verify"], "package_hash": "ab" * 32, "commit": "c" * 40, "dirty": False}


def seeded(case: str, seed: int) -> str:
    return CaseSpec.parse(case).with_seed(seed).id


def report_of(results: list[CaseResult], plan: Plan, more: tuple[str, ...] = (), **environment: Any) -> RunReport:
    interrupted = any(result.reason == "interrupted" for result in results)
    planned = tuple(Planned(r.case, r.kernel) for r in results)
    return RunReport(planned, tuple(results), ENVIRONMENT | environment, *decide(plan, results, interrupted, more))


def plan_of(*kernels: type[Absorbed], **fields: Any) -> Plan:
    made = tuple(cast("Kernel", kernel()) for kernel in kernels)
    return Plan(entries=(), kernels=made, **fields)


def written(folder: Path, text: str) -> Path:
    path = folder / "summary.json"
    path.write_text(text)
    return path


def many(seeds: int = 3, **fields: Any) -> list[CaseResult]:
    """Every case with a few seeds on two kernels, PASS with a comparison."""
    return [
        fake_result(
            case=seeded(case, seed),
            kernel=kernel,
            comparisons=(replace(comparison(z=seed + 0.5), rms_z=0.9 - seed / 10),),
            **fields,
        )
        for case in (DECODE, PREFILL)
        for seed in range(seeds)
        for kernel in ("absorbed", "other")
    ]


# A run


def test_a_summary_of_a_real_run_counts_what_the_report_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register_kernels(monkeypatch, [wrong.Honest, wrong.OneElement, failing.Raises])
    path = tmp_path / "s.json"
    run = verify(tmp_path, *cases(RAGGED), "--seeds", "3", "--summary", path)
    summary = read_summary(path)
    assert run.exit_code == 1
    assert {planned.case for planned in run.report.plan} == {seeded(RAGGED, seed) for seed in range(3)}
    document = json.loads(path.read_text())
    assert (document["decision"], document["exit_code"], document["reasons"]) == ("wrong", 1, list(run.report.reasons))
    assert document["environments"] == [dict(run.report.environment)]
    for kernel in ("honest", "one-element", "raises"):
        mine = [result for result in run.report.results if result.kernel == kernel]
        found = document["kernels"][kernel]
        assert found["verdicts"] == Counter(result.verdict.value for result in mine)
        assert found["cases"] == 3
        compared = [c for result in mine for c in result.comparisons]
        assert found["elements"] == (3 * 5 * 8 * (512 + 1) if compared else 0)  # 5 queries, out and LSE
        if compared:
            worst = max((abs(c.worst.z), c.tensor) for c in compared if c.worst)
            assert found["worst_z"]["z"] == pytest.approx(worst[0], rel=1e-5)
            assert found["worst_z"]["limit"] > 5
            rms = [c.rms_z for c in compared if c.tensor == "out"]
            assert found["rms_z"]["bf16"]["out"] == pytest.approx([min(rms), max(rms)], rel=1e-5)
        assert found["seconds"].keys() == {stage for result in mine for stage in result.seconds}
    template = RAGGED.removesuffix("-s7")
    assert document["table"][0]["cases"] == {template: {"honest": "PPP", "one-element": "FFF", "raises": "EEE"}}
    assert [(why.kernel, why.count) for why in summary.why if why.kernel == "raises"] == [("raises", 3)]


def test_decision_and_exit_code_follow_from_the_table(tmp_path: Path) -> None:
    passing = many()
    open_case = [*passing[:-1], replace(passing[-1], verdict=Verdict.TIMEOUT, reason="too slow")]
    undecided = [replace(r, verdict=Verdict.UNSUPPORTED, reason="no") for r in passing]
    wrong_one = [replace(passing[0], verdict=Verdict.FAIL, reason="out: too far"), *passing[1:]]
    interrupted = [*passing[:-1], replace(passing[-1], verdict=Verdict.NOT_RUN, reason="interrupted")]
    claims = {"absorbed": (("phase", "decode"), ("dtype", "fp32")), "other": (("phase", "spec"),)}
    for results, fields, more, exit_code in (
        (passing, {}, (), 0),
        (open_case, {}, (), 3),
        (undecided, {}, (), 3),
        (wrong_one, {}, (), 1),
        (interrupted, {}, (), 130),
        (passing, {"claims": claims}, (), 3),
        (passing, {}, ("Something else is open.",), 3),
        ([replace(r, verdict=Verdict.UNSUPPORTED, reason="no") if r.kernel == "other" else r for r in passing],
         {"named": ("other",), "required": ("other",)}, (), 3),
        ([replace(r, verdict=Verdict.UNSUPPORTED, reason="no") if r.phase == "decode" else r for r in passing],
         {"named_cases": tuple(dict.fromkeys(r.case for r in passing))}, (), 3),
    ):  # fmt: skip
        plan = plan_of(Absorbed, Other, **fields)
        report = report_of(results, plan, more)
        summary = read_summary(written(tmp_path, to_summary(report, plan, more)))
        assert report.exit_code == exit_code
        assert summary.decide()[:2] == (report.decision, exit_code)
        assert sorted(summary.decide().reasons) == sorted(report.reasons)


def test_a_required_kernel_that_is_unavailable_stays_a_reason(tmp_path: Path) -> None:
    plan = plan_of(Absorbed, Gone, named=("gone",), required=("gone",), unavailable={"gone": "not installed"})
    results = [r for r in many() if r.kernel == "absorbed"]
    summary = read_summary(written(tmp_path, to_summary(report_of(results, plan), plan, ())))
    assert summary.decide().exit_code == 3
    assert "not installed" in summary.decide().reasons[0]


@pytest.mark.parametrize(
    "case",
    [
        "mixed-absorbed-h8-q2.kv140+q0.kv64+q3.kv70-p64-bf16-normal-s7",
        "prefix-mha-h8-q3.kv150+q2.kv70-ragged-bf16-normal-s7",
        "decode-absorbed-h8-q1.kv9-p64-bf16-normal-dims128.32.64.64-s7",
        "keys-concat-h8-q5.kv5-ragged-bf16-rows-s7",
        "queries-concat-h8-q5.kv5-ragged-bf16-rows-s7",
        "prefix-layer-h8-q2.kv9-p64-bf16-normal-s7",
    ],
)
def test_elements_are_those_of_the_output(case: str) -> None:
    spec = CaseSpec.parse(case)
    inputs = make_inputs(spec)
    elements = output_buffers(inputs, torch.bfloat16).output.out.numel()
    pair = Pair(case, "k", "P", spec.phase, spec.dtype, False)
    assert pair.elements(lse=False) == elements
    assert pair.elements(lse=True) == elements + spec.num_q_tokens * spec.num_heads
    for letter in "RWECTUN":
        assert replace(pair, letter=letter).elements(lse=True) == 0
    assert replace(pair, letter="F").elements(lse=False) == elements


def test_of_a_cache_write_the_written_rows_count() -> None:
    assert (
        Pair("append-write-h1-q8.kv20-p64-bf16-rows-s0", "k", "P", "append", "bf16", False).elements(False) == 8 * 576
    )


def test_a_failure_that_was_not_compared_counts_no_elements(tmp_path: Path) -> None:
    against = replace(comparison(), tensor="against out")
    broken = fake_result(Verdict.FAIL, comparisons=(against,))
    plan = plan_of(Absorbed)
    text = to_summary(report_of([broken], plan), plan, ())
    assert json.loads(text)["table"][0]["cases"] == {DECODE.removesuffix("-s7"): {"absorbed": "R"}}
    assert json.loads(text)["elements"] == 0
    assert json.loads(text)["kernels"]["absorbed"]["worst_z"] is None
    assert read_summary(written(tmp_path, text)).decide().exit_code == 1


def test_a_case_of_an_inputs_file_keeps_its_phase_and_dtype(tmp_path: Path) -> None:
    case = replace(fake_result(comparisons=(comparison(),)), case="inputs-layer-s3-0123456789ab", dtype="fp16")
    plan = plan_of(Absorbed, claims={"absorbed": (("phase", "decode"), ("dtype", "fp16"))}, named_cases=(case.case,))
    summary = read_summary(written(tmp_path, to_summary(report_of([case], plan), plan, ())))
    assert [(p.case, p.phase, p.dtype, p.named) for p in summary.pairs] == [(case.case, "decode", "fp16", True)]
    assert summary.decide().exit_code == 0


def test_observations_are_counted(tmp_path: Path) -> None:
    results = [replace(r, observed={"repeats": n % 3 > 0}) for n, r in enumerate(many())]
    plan = plan_of(Absorbed, Other)
    summary = read_summary(written(tmp_path, to_summary(report_of(results, plan), plan, ())))
    assert summary.kernels["absorbed"].observed == {"repeats": {"no": 2, "yes": 4}}


def test_fifty_thousand_pairs_take_less_than_a_megabyte(tmp_path: Path) -> None:
    results = []
    for n in range(1250):
        case = f"mixed-absorbed-h128-q{n // 25 + 1}.kv{1000 + n % 25}+2xq1.kv0+q5.kv100-p64-bf16-normal-fused-s0"
        verdict = Verdict.PASS if n % 25 else Verdict.FAIL
        results += [
            fake_result(verdict, seeded(case, seed), f"flashinfer-{k}", comparisons=(comparison(),))
            for seed in range(10)
            for k in range(4)
        ]
    # Each failure with a long reason of its own, as they name an element.
    results = [replace(r, reason=f"{n} " + "x" * 600) if r.reason else r for n, r in enumerate(results)]
    kernels = [type("K", (Absorbed,), {"name": f"flashinfer-{k}"}) for k in range(4)]
    plan = plan_of(*kernels)
    text = to_summary(report_of(results, plan), plan, ())
    assert len(results) == 50_000
    assert len(text) < 1_000_000
    assert len(read_summary(written(tmp_path, text)).pairs) == 50_000


# A summary that was changed


def edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        document = json.loads(text)
        edit(document)
        return json.dumps(document)

    return apply


def group(document: dict[str, Any]) -> dict[str, str]:
    kernels: dict[str, str] = next(iter(document["table"][0]["cases"].values()))
    return kernels


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[:-9], "cannot read the summary"),
        (lambda text: "[]", "is no summary"),
        (edited(lambda d: d.update(summary_version=9)), "summary version 9"),
        (edited(lambda d: d.pop("why")), "is no summary: KeyError: 'why'"),
        (edited(lambda d: d.update(decision="wrong")), "decision is 'wrong', and the table makes it 'pass'"),
        (edited(lambda d: d.update(exit_code=1)), "exit_code is 1, and the table makes it 0"),
        (edited(lambda d: d.update(reasons=["x"])), "reasons is"),
        (edited(lambda d: d.update(elements=d["elements"] + 1)), "elements is"),
        (edited(lambda d: d.update(pairs=13)), "pairs is 13, and the table makes it 12"),
        (edited(lambda d: d.update(cases=7)), "cases is 7, and the table makes it 6"),
        (edited(lambda d: d["largest_case"].update(elements=1)), "largest_case.elements is 1"),
        (edited(lambda d: d["kernels"]["other"]["verdicts"].update(PASS=7)), "kernels.other.verdicts.PASS is 7"),
        (edited(lambda d: d["kernels"]["other"].update(cases=5)), "kernels.other.cases is 5"),
        (edited(lambda d: d["kernels"]["other"].update(elements=5)), "kernels.other.elements is 5"),
        (edited(lambda d: d["kernels"]["other"].update(lse=True)), "elements is"),
        (edited(lambda d: d["kernels"]["other"].update(extra=1)), "kernels.other.extra is there"),
        (edited(lambda d: d["kernels"].pop("other")), "it has no kernel other"),
        (edited(lambda d: group(d).update(other="FPP")), "is 'pass', and the table makes it 'wrong'"),
        (edited(lambda d: group(d).update(other="PP")), "has the verdicts 'PP' for 3 seeds"),
        (edited(lambda d: group(d).update(other="PPX")), "has the verdicts 'PPX'"),
        (edited(lambda d: group(d).pop("other")), "pairs is 12, and the table makes it 9"),
        (edited(lambda d: d["table"].append(d["table"][0])), "twice"),
        (edited(lambda d: d["table"][0].update(seeds="0-1,9")), "largest_case.case is"),
        (edited(lambda d: d["kernels"]["other"]["worst_z"].update(case="x")), "the worst z is of x, which it did not"),
        (edited(lambda d: d["kernels"]["other"]["worst_z"].update(z=99)), "|z| 99.0 is over 6.0, and nothing is"),
        (edited(lambda d: d["kernels"]["other"]["rms_z"]["fp32"].update(out=[2, 1])), "an rms z goes from 2 to 1"),
        (edited(lambda d: d["kernels"]["other"].update(observed={"repeats": {"yes": 9}})), "was observed"),
        (edited(lambda d: d["why"].append({"kernel": "other", "verdict": "PASS", "reason": "", "tool_error": False,
                                           "count": 1})), "gives reasons for 1"),
    ],
)  # fmt: skip
def test_a_summary_that_was_changed_is_refused(edit: Callable[[str], str], message: str, tmp_path: Path) -> None:
    plan = plan_of(Absorbed, Other)
    path = written(tmp_path, to_summary(report_of(many(), plan), plan, ()))
    read_summary(path)
    path.write_text(edit(path.read_text()))
    with pytest.raises(UsageError) as caught:
        read_summary(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message


def test_a_failure_that_was_made_a_pass_is_refused(tmp_path: Path) -> None:
    plan = plan_of(Absorbed, Other)
    results = many()
    results[0] = replace(results[0], verdict=Verdict.FAIL, reason="out: too far", comparisons=(comparison(z=9.0),))
    text = to_summary(report_of(results, plan), plan, ())

    def hide(document: dict[str, Any]) -> None:
        group(document).update(absorbed="PPP")
        document.update(decision="pass", exit_code=0, reasons=[], num_reasons=0)
        document["kernels"]["absorbed"]["verdicts"] = {"PASS": 6}

    with pytest.raises(UsageError, match="and nothing is a FAIL by comparison"):
        read_summary(written(tmp_path, edited(lambda d: (hide(d), d.update(why=[])))(text)))
    with pytest.raises(UsageError) as caught:
        read_summary(written(tmp_path, edited(hide)(text)))
    assert "absorbed" in caught.value.message


# Several runs as one


def halves() -> tuple[Summary, list[str]]:
    plan = plan_of(Absorbed, Other)
    results = many()
    parts = [[r for r in results if r.kernel == kernel] for kernel in ("absorbed", "other")]
    plans = [plan_of(Absorbed), plan_of(Other)]
    texts = [to_summary(report_of(part, p, commit=None), p, ()) for part, p in zip(parts, plans, strict=True)]
    return _read(to_summary(report_of(results, plan), plan, ())), texts


def _read(text: str) -> Summary:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return read_summary(written(Path(folder), text))


def test_two_halves_of_a_run_merge_to_the_counts_of_the_whole(tmp_path: Path) -> None:
    whole, texts = halves()
    merged = _read(render(merge_summaries([_read(text) for text in texts], commit="d" * 40)))
    assert len(merged.environments) == 2
    assert merged.commit == "d" * 40
    assert set(merged.pairs) == set(whole.pairs)
    one, other = (json.loads(render(summary)) for summary in (merged, whole))
    for key in ("decision", "exit_code", "reasons", "elements", "cases", "pairs", "largest_case", "kernels"):
        assert one[key] == other[key]


def test_facts_of_a_kernel_in_two_runs_are_joined() -> None:
    plan = plan_of(Absorbed)
    mine = [r for r in many(4) if r.kernel == "absorbed"]
    mine = [replace(r, observed={"repeats": r.phase == "decode"}) for r in mine]
    parts = [_read(to_summary(report_of(part, plan), plan, ())) for part in (mine[:3], mine[3:])]
    whole = _read(to_summary(report_of(mine, plan), plan, ()))
    assert merge_summaries(parts).kernels == whole.kernels


def test_a_failure_in_one_run_makes_the_merged_one_wrong() -> None:
    plan = plan_of(Absorbed, Other)
    _, texts = halves()
    bad = fake_result(Verdict.FAIL, seeded(DECODE, 9), comparisons=(comparison(),))
    failing_run = _read(to_summary(report_of([bad], plan, commit=None), plan, ()))
    merged = merge_summaries([*map(_read, texts), failing_run])
    assert merged.decide()[:2] == ("wrong", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s, "is in more than one summary"),
        (lambda s: replace(s, package_hash="cd" * 32), "more than one package hash"),
        (lambda s: replace(s, commit="e" * 40), "more than one commit"),
    ],
)
def test_runs_that_do_not_belong_together_are_not_merged(change: Callable[[Summary], Summary], message: str) -> None:
    whole, _ = halves()
    with pytest.raises(UsageError, match=message):
        merge_summaries([whole, change(whole)])


def test_a_kernel_with_and_without_an_lse_is_not_merged() -> None:
    facts = KernelFacts(True, False, False, None, (), None, {}, {}, {})
    with pytest.raises(UsageError, match="returns an LSE in one summary"):
        facts.merged("k", replace(facts, lse=False))


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout with one commit."""
    folder = tmp_path / "checkout"
    for name in ("mla_verify/cli.py", "mla_verify/kernels/x.py", "reference/rope.py", "evals/tasks.py", "README.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "all")
    return folder


def test_the_package_hash_of_a_commit_is_that_of_its_files(checkout: Path) -> None:
    before = package_hash(checkout / "mla_verify")
    assert hash_of_commit(checkout, "HEAD") == before
    (checkout / "reference/rope.py").write_text("other")
    assert hash_of_commit(checkout, "HEAD") == before != package_hash(checkout / "mla_verify")


def test_merged_evidence_names_the_commit_whose_source_ran(checkout: Path, tmp_path: Path) -> None:
    plan = plan_of(Absorbed)
    results = [r for r in many() if r.kernel == "absorbed"]
    text = to_summary(
        report_of(results, plan, commit=None, package_hash=package_hash(checkout / "mla_verify")), plan, ()
    )
    path = written(tmp_path, text)
    line = merge([path], tmp_path / "out.json", "HEAD", root=checkout)
    assert "6 pairs" in line
    assert read_summary(tmp_path / "out.json").commit == git(checkout, "rev-parse", "HEAD")
    (checkout / "evals/tasks.py").write_text("other")
    git(checkout, "commit", "-q", "-a", "-m", "other")
    with pytest.raises(UsageError, match="has package hash"):
        merge([path], tmp_path / "no.json", "HEAD", root=checkout)
    assert not (tmp_path / "no.json").exists()


def test_a_run_with_uncommitted_changes_names_no_commit() -> None:
    plan = plan_of(Absorbed, Other)
    assert _read(to_summary(report_of(many(), plan), plan, ())).commit == "c" * 40
    assert _read(to_summary(report_of(many(), plan, dirty=True), plan, ())).commit is None


# Seeds


def test_seeds_gives_every_case_each_seed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Absorbed)
    plan = build_plan(make_config(cases=[DECODE, PREFILL, seeded(DECODE, 3)], device="cpu", seeds="4"))
    ids = [entry.case_id for entry in plan.entries]
    assert ids == [seeded(case, seed) for case in (DECODE, PREFILL) for seed in range(4)]
    assert plan.named_cases == tuple(ids)


def test_seeds_from_one_to_another_are_those_and_the_first_alone_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Absorbed)
    plan = build_plan(make_config(cases=[DECODE], device="cpu", seeds="7-9"))
    assert [entry.case_id for entry in plan.entries] == [seeded(DECODE, seed) for seed in (7, 8, 9)]
    assert [entry.observed for entry in plan.entries] == [True, False, False]


def test_a_kernel_is_called_again_on_the_first_of_several_seeds_alone(tmp_path: Path) -> None:
    run = verify(tmp_path, "--kernel", "torch-absorbed", *cases(DECODE), "--seeds", "2")
    assert [bool(result.observed) for result in run.report.results] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "2", "--seed", "1"], "--seed and --seeds exclude each other"),
        (["--seeds", "2", "--inputs", "x"], "--inputs and --seeds exclude each other"),
        (["--seeds", "0"], "--seeds 0: that is 0 seeds; 1 to 1000000 are allowed"),
        (["--seeds", "5-3"], "--seeds 5-3: that is 0 seeds"),
        (["--seeds", "0-9999999"], "that is 10000000 seeds"),
        (["--seeds", "ten"], "--seeds ten: neither a number nor two"),
        (["--list", "--summary", "x"], "--list runs nothing, so --summary has no effect"),
        (["--summary", "/proc/x"], "--summary /proc/x: no file can be made"),
        (["--summary", "x.json", "--json", "x.json"], "--json and --summary name the same place"),
    ],
)
def test_wrong_flags_are_told(arguments: list[str], message: str) -> None:
    done = invoke("kernels", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_contract_of_a_fake_returns_no_lse() -> None:
    """many() counts on it: elements of these are those of out alone."""
    assert not Contract("absorbed").returns_lse
