from __future__ import annotations

import io
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import junitparser
import pytest
from rich.console import Console

from mla_verify.errors import UsageError
from mla_verify.report.console import MAX_BLOCKS, MAX_LINES, print_report
from mla_verify.report.files import write_whole
from mla_verify.report.json_report import read_json, to_json
from mla_verify.report.junit import to_junit
from mla_verify.report.progress import progress_bar
from mla_verify.results import CaseResult, Planned, RunReport, Verdict
from tests.fakes import DECODE, MHA, PREFILL, comparison, result

ILLEGAL_IN_XML = "\x00\x08\x0b\x1b\x1f\ud800\ufffe\uffff"
EVERY_VERDICT = [result(verdict, DECODE.replace("-s7", f"-s{n}")) for n, verdict in enumerate(Verdict)]


def report_of(results: list[CaseResult], **fields: Any) -> RunReport:
    known: dict[str, Any] = {
        "environment": {"started": "2026-01-02T03:04:05+00:00", "seed": None},
        "decision": "wrong",
        "exit_code": 1,
        "reasons": ("one reason.", "another reason."),
    }
    return RunReport(tuple(Planned(r.case, r.kernel) for r in results), tuple(results), **known | fields)


def shown(report: RunReport, **settings: Any) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, **settings))
    return out.getvalue()


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


# JSON


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), -0.0, 0.1, 5e-324])
def test_json_is_strict_and_gives_every_number_back(number: float, tmp_path: Path) -> None:
    compared = comparison(value=number, limit=number, z=number, actual=number)
    results = [result(Verdict.FAIL, comparisons=(compared, comparison(tensor="lse")), seconds={"kernel": number})]
    text = to_json(report_of(results, environment={"odd": number}))
    json.loads(text, parse_constant=refuse)
    (tmp_path / "r.json").write_text(text)
    back = read_json(tmp_path / "r.json")
    # By repr, in which NaN equals itself and -0.0 does not equal 0.0.
    assert repr(back.results) == repr(tuple(results))


def test_json_gives_a_whole_report_back(tmp_path: Path) -> None:
    report = report_of([*EVERY_VERDICT, result(Verdict.ERROR, MHA, "mha", traceback="T", tool_error=True, ran="fa3")])
    (tmp_path / "r.json").write_text(to_json(report))
    assert read_json(tmp_path / "r.json") == report


def test_json_says_of_each_comparison_and_check_whether_it_passed() -> None:
    results = [result(Verdict.FAIL, comparisons=(comparison(value=7.0), comparison(value=float("nan")), comparison()))]
    found = json.loads(to_json(report_of(results)))["results"][0]["comparisons"]
    assert [entry["passed"] for entry in found] == [False, False, True]
    assert [check["passed"] for check in found[1]["checks"]] == [False, True]


def test_json_of_a_value_it_does_not_know_is_its_text_and_no_lost_report() -> None:
    document = json.loads(to_json(report_of([result()], environment={"path": Path("/x"), "lone": "\udc80"})))
    assert document["environment"] == {"path": "/x", "lone": "\udc80"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[: len(text) // 2], "is no report"),
        (lambda text: "[]", "is no report"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "schema version 99"),
        (lambda text: text.replace('"verdict": "PASS"', '"verdict": "FINE"'), "'FINE' is not a valid Verdict"),
        (lambda text: text.replace('"claim"', '"claims"'), "unexpected keyword argument 'claims'"),
        (lambda text: re.sub(r'"plan": \[[^]]*\]', '"plan": []', text), "verdicts do not match the plan"),
    ],
)
def test_reading_something_else_than_a_report_is_a_usage_error(edit: Any, message: str, tmp_path: Path) -> None:
    text = to_json(report_of([result(comparisons=(comparison(),))]))
    (tmp_path / "r.json").write_text(edit(text))
    with pytest.raises(UsageError) as caught:
        read_json(tmp_path / "r.json")
    assert message in caught.value.message


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_report_that_cannot_be_read_is_a_usage_error(content: bytes | None, tmp_path: Path) -> None:
    if content:
        (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(UsageError, match="cannot read the report"):
        read_json(tmp_path / "r.json")


# JUnit


def parsed(report: RunReport, tmp_path: Path) -> junitparser.JUnitXml:
    (tmp_path / "r.xml").write_text(to_junit(report), encoding="utf-8")
    return junitparser.JUnitXml.fromfile(str(tmp_path / "r.xml"))


def test_junit_holds_one_test_case_for_each_planned_case_in_one_suite_a_kernel(tmp_path: Path) -> None:
    report = report_of([*EVERY_VERDICT, result(Verdict.PASS, MHA, "mha")])
    suites = parsed(report, tmp_path)
    assert [(suite.name, [case.name for case in suite]) for suite in suites] == [
        ("absorbed", [r.case for r in EVERY_VERDICT]),
        ("mha", [MHA]),
    ]
    assert all(case.classname == suite.name and case.time == 0.75 for suite in suites for case in suite)
    assert (suites.tests, suites.failures, suites.errors, suites.skipped) == (len(report.plan), 4, 2, 1)


@pytest.mark.parametrize(
    ("verdict", "element"),
    [
        (Verdict.PASS, None),
        (Verdict.FAIL, junitparser.Failure),
        (Verdict.WRONG_SHAPE, junitparser.Failure),
        (Verdict.ERROR, junitparser.Failure),
        (Verdict.CRASH, junitparser.Failure),
        (Verdict.TIMEOUT, junitparser.Error),
        (Verdict.NOT_RUN, junitparser.Error),
        (Verdict.UNSUPPORTED, junitparser.Skipped),
    ],
)
def test_junit_element_of_each_verdict(verdict: Verdict, element: type | None, tmp_path: Path) -> None:
    (suite,) = parsed(report_of([result(verdict)]), tmp_path)
    (case,) = suite
    assert [type(entry) for entry in case.result] == ([element] if element else [])
    if element:
        assert (case.result[0].type, case.result[0].message) == (
            verdict.value,
            f"{verdict.value}: a reason for {verdict.value}",
        )


def test_junit_failure_says_what_failed_where_and_how_to_repeat_it(tmp_path: Path) -> None:
    failed = result(Verdict.FAIL, comparisons=(comparison(value=51.25, z=51.25),))
    (suite,) = parsed(report_of([failed]), tmp_path)
    (case,) = suite
    text = case.result[0].text
    assert "out: max_z 51.25, limit 6 (over all elements)" in text
    assert "request 2, token 3, head 5, dim 77: actual 1.25, expected 1.5, z 51.2" in text
    assert failed.repeat in text


def test_junit_carries_the_decision_that_no_test_case_shows(tmp_path: Path) -> None:
    suites = parsed(report_of([result()], decision="inconclusive", exit_code=3), tmp_path)
    properties = [(entry.name, entry.value) for suite in suites for entry in suite.properties()]  # type: ignore[no-untyped-call]
    assert properties == [
        ("decision", "inconclusive"),
        ("exit_code", "3"),
        ("reason", "one reason."),
        ("reason", "another reason."),
    ]


def test_junit_stays_readable_when_a_kernels_message_holds_what_xml_forbids(tmp_path: Path) -> None:
    reason = f"<b>]]>&\"' {ILLEGAL_IN_XML}\u00e9\U0001f600"
    failed = result(Verdict.ERROR, reason=reason, claim=ILLEGAL_IN_XML, traceback=reason, repeat=ILLEGAL_IN_XML)
    report = report_of([failed], reasons=(reason,), environment={"started": ILLEGAL_IN_XML})
    (suite,) = parsed(report, tmp_path)
    (case,) = suite
    assert case.result[0].message == "ERROR: <b>]]>&\"' \u00e9\U0001f600"


# Console


def test_console_table_counts_each_kernel_by_itself() -> None:
    passed = result(Verdict.PASS, PREFILL, "mha", comparisons=(comparison(z=-4.25),))
    table = shown(report_of([*EVERY_VERDICT, passed]))
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.startswith((" absorbed", " mha"))}
    (header,) = [line.split() for line in table.splitlines() if line.startswith(" kernel ")]
    assert header == ["kernel", "planned", "decided", "passed", "failed", "unsupported", "worst", "z"]
    assert rows == {"absorbed": ["8", "5", "1", "4", "1", "-"], "mha": ["1", "1", "1", "0", "0", "4.25"]}


@pytest.mark.parametrize("worst", [9.5, -9.5, float("inf"), float("nan")])
def test_console_shows_where_the_worst_z_of_a_kernel_is(worst: float) -> None:
    results = [
        result(Verdict.PASS, DECODE, comparisons=(comparison(z=3.0),)),
        result(Verdict.PASS, PREFILL, comparisons=(comparison(z=-1.0), comparison(tensor="lse", z=worst))),
        result(Verdict.PASS, DECODE.replace("-s7", "-s8"), comparisons=(comparison(z=5.0),)),
    ]
    lines = shown(report_of(results)).splitlines()
    where = lines.index(f"worst z of absorbed: lse of {PREFILL}")
    assert lines[where + 1] == f"  request 2, token 3, head 5, dim 77: actual 1.25, expected 1.5, z {worst:.3g}"


def test_console_failure_names_kernel_case_claim_checks_element_and_the_command_that_repeats_it() -> None:
    failed = result(Verdict.FAIL, comparisons=(comparison(value=51.25, z=51.25), comparison(tensor="lse")))
    block = shown(report_of([failed])).split("\n\n")[0].splitlines()
    assert block == [
        f"FAIL  absorbed  {DECODE}",
        "  claim   the claim",
        "  out: max_z 51.25, limit 6 (over all elements)",
        "  out: worst at request 2, token 3, head 5, dim 77: actual 1.25, expected 1.5, z 51.2",
        f"  repeat  mla-verify kernels --kernel absorbed --case {DECODE} --device cpu",
    ]


def test_console_shows_the_reason_and_the_end_of_the_traceback_of_a_kernel_that_raised() -> None:
    trace = "\n".join(["Traceback", *(f"frame {n}" for n in range(40)), "ValueError: bad [bold]page[/bold]"])
    text = shown(report_of([result(Verdict.ERROR, reason="it raised [red]x[/red] :bug:", traceback=trace)]))
    assert "  reason  it raised [red]x[/red] :bug:\n" in text
    assert "    frame 39\n    ValueError: bad [bold]page[/bold]\n" in text
    assert "frame 20" not in text


def test_console_shows_a_few_failures_of_each_kernel_in_full_the_next_in_a_line_and_how_many_more_there_are() -> None:
    count = MAX_BLOCKS + MAX_LINES + 3
    results = [result(Verdict.FAIL, DECODE.replace("-s7", f"-s{n}"), k) for k in ("a", "b") for n in range(count)]
    text = shown(report_of(results))
    assert text.count("  repeat  ") == 2 * MAX_BLOCKS
    for kernel in ("a", "b"):
        short = f"FAIL  {kernel}  {DECODE.replace('-s7', f'-s{MAX_BLOCKS}')}  a reason for FAIL\n"
        assert text.count(short) == 1
        assert f"... and 3 more of {kernel}: --json has all" in text


def test_console_says_of_which_dtypes_nothing_is_known() -> None:
    undecided = [result(Verdict.UNSUPPORTED, PREFILL, kernel) for kernel in ("a", "b")]  # bf16; DECODE is fp32
    lines = shown(report_of([result(Verdict.PASS, DECODE, "a"), *undecided])).splitlines()
    assert lines[-1] == "  not checked: bf16 of a, b"
    assert "not checked" not in shown(report_of([result(Verdict.PASS, DECODE, "a")]))


def test_console_gathers_open_cases_by_reason() -> None:
    results = [result(Verdict.UNSUPPORTED, DECODE.replace("-s7", f"-s{n}"), reason="page size 1") for n in range(30)]
    results += [result(Verdict.NOT_RUN, PREFILL, reason="out of memory")]
    text = shown(report_of(results))
    assert "UNSUPPORTED  absorbed: 30 x page size 1\nNOT_RUN  absorbed: 1 x out of memory\n" in text


def test_console_shows_the_traceback_of_an_error_of_the_tool() -> None:
    broken = result(Verdict.NOT_RUN, tool_error=True, traceback="Traceback ...\nKeyError: 'x'\n")
    assert f"mla-verify itself failed on {DECODE}:\nTraceback ...\nKeyError: 'x'\n" in shown(report_of([broken]))


def test_console_ends_with_the_decision_and_its_reasons() -> None:
    assert shown(report_of(EVERY_VERDICT)).splitlines()[-3:] == [
        "WRONG: 5 of 8 planned cases decided, 4 wrong (exit 1)",
        "  one reason.",
        "  another reason.",
    ]


def test_console_breaks_no_id_command_or_row_of_the_table_when_piped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long_case = PREFILL.replace("q9.kv9", "+".join(f"q{n}.kv{n}" for n in range(9, 40)))
    kernel = "folder/of/kernels/a_file_name_as_long_as_that.py:and_a_function"
    failed = result(Verdict.FAIL, long_case, kernel, comparisons=(comparison(value=7.0),))
    lines = shown(report_of([failed])).splitlines()
    assert lines[0].endswith(long_case)
    assert f"  repeat  {failed.repeat}" in lines
    (row,) = [line.split() for line in lines if line.startswith(f" {kernel} ")]
    assert row == [kernel, "1", "1", "0", "1", "0", "0.5"]


@pytest.mark.parametrize(
    ("settings", "colors"),
    [({"NO_COLOR": "1"}, False), ({}, True)],
)
def test_console_obeys_no_color(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], colors: bool) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    text = shown(report_of(EVERY_VERDICT), force_terminal=True, color_system="standard")
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", text)) is colors  # 30 to 37 are the colours


def test_console_sends_no_escape_codes_into_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert "\x1b" not in shown(report_of(EVERY_VERDICT))


# Progress


def test_progress_counts_passed_failed_and_open_on_a_terminal() -> None:
    out = io.StringIO()
    with progress_bar(len(EVERY_VERDICT), Console(file=out, force_terminal=True, width=80)) as show:
        for done in EVERY_VERDICT:
            show(done)
    last = Counter(re.findall(r"\d+/\d+|\d+ passed|\d+ failed|\d+ open", out.getvalue()))
    assert {"8/8", "1 passed", "4 failed", "3 open"} <= set(last)


def test_progress_prints_nothing_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar(1) as show:
        show(result())
    assert capsys.readouterr() == ("", "")


# Files


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_whole(path, "old \u00e9")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new " * 100_000 + "\ud800")  # fails after much of it was written
    assert (path.read_text(encoding="utf-8"), list(tmp_path.iterdir())) == ("old \u00e9", [path])

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert (path.read_text(encoding="utf-8"), list(tmp_path.iterdir())) == ("old \u00e9", [path])


def test_a_file_behind_a_symbolic_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "r.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "written", "")
    (tmp_path / "touched").touch()
    assert (tmp_path / "written").stat().st_mode == (tmp_path / "touched").stat().st_mode
