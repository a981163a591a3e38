"""RunReport -> JUnit XML as GitHub's and GitLab's readers take it: one suite a kernel, one test case a planned case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from mla_verify.report.text import failed_checks
from mla_verify.results import CaseResult, RunReport, Verdict

# What XML 1.0 allows, escaped or not (section 2.2, Char). A kernel's message may hold anything.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_ELEMENTS = {Verdict.TIMEOUT: "error", Verdict.NOT_RUN: "error", Verdict.UNSUPPORTED: "skipped"}
_COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}  # attribute -> element


def to_junit(report: RunReport) -> str:
    """The report as JUnit XML text. What no test case can say, the decision and its reasons, is in the properties."""
    root = ElementTree.Element("testsuites", {"name": "mla-verify", **_totals(report.results)})
    for kernel in dict.fromkeys(planned.kernel for planned in report.plan):
        results = [result for result in report.results if result.kernel == kernel]
        suite = ElementTree.SubElement(root, "testsuite", {"name": kernel, **_totals(results)})
        if "started" in report.environment:
            suite.set("timestamp", _legal(str(report.environment["started"])))
        properties = ElementTree.SubElement(suite, "properties")
        verdict = [("decision", report.decision), ("exit_code", str(report.exit_code))]
        for name, value in (*verdict, *(("reason", reason) for reason in report.reasons)):
            ElementTree.SubElement(properties, "property", {"name": name, "value": _legal(value)})
        for result in results:
            _add_case(suite, result)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _element(result: CaseResult) -> str | None:
    if result.verdict is Verdict.PASS:
        return None
    return _ELEMENTS.get(result.verdict, "failure")


def _totals(results: Sequence[CaseResult]) -> dict[str, str]:
    elements = [_element(result) for result in results]
    counts = {attribute: str(elements.count(element)) for attribute, element in _COUNTS.items()}
    return {"tests": str(len(results)), **counts, "time": f"{sum(map(_seconds, results)):.3f}"}


def _seconds(result: CaseResult) -> float:
    return sum(result.seconds.values())


def _add_case(suite: ElementTree.Element, result: CaseResult) -> None:
    attributes = {"classname": result.kernel, "name": result.case, "time": f"{_seconds(result):.3f}"}
    case = ElementTree.SubElement(suite, "testcase", {name: _legal(value) for name, value in attributes.items()})
    element = _element(result)
    if element is None:
        return
    message = f"{result.verdict.value}: {result.reason}"
    entry = ElementTree.SubElement(case, element, {"message": _legal(message), "type": result.verdict.value})
    lines = [f"claim: {result.claim}", *failed_checks(result), f"repeat: {result.repeat}", result.traceback]
    entry.text = _legal("\n".join(line for line in lines if line))


def _legal(text: str) -> str:
    return _ILLEGAL.sub("", text)
