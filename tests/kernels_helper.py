"""Runs `mla-verify kernels` on test kernels, and holds its files against its plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mla_verify.kernels.merge_parts import MergedKernel
from mla_verify.report.json_report import read_json
from mla_verify.results import CaseResult, RunReport, Verdict
from tests.cli_helper import Result, invoke
from tests.wrong_kernels import Honest

DECODE = "decode-absorbed-h8-q1.kv300+q1.kv201-p64-bf16-normal-s7"
# Row 3 of its queries is token 1 of request 2: the second request has none.
RAGGED = "mixed-absorbed-h8-q2.kv140+q0.kv64+q3.kv70-p64-bf16-normal-s7"
SINGLE = "decode-absorbed-h8-q1.kv130-p64-bf16-normal-s7"
MHA = "prefix-mha-h8-q3.kv150+q2.kv70-ragged-bf16-normal-s7"

_JUNIT = {"failure": ("FAIL", "WRONG_SHAPE", "ERROR", "CRASH"), "error": ("TIMEOUT", "NOT_RUN")}
_JUNIT["skipped"] = ("UNSUPPORTED",)


def register(monkeypatch: pytest.MonkeyPatch, kernels: Sequence[type[Honest | MergedKernel]]) -> None:
    """Make these the only kernels there are."""
    table = {kernel.name: f"{kernel.__module__}:{kernel.__name__}" for kernel in kernels}
    monkeypatch.setattr("mla_verify.kernels.KERNELS", table)


@dataclass(frozen=True)
class Run:
    done: Result
    report: RunReport

    @property
    def exit_code(self) -> int:
        return self.done.exit_code

    @property
    def only(self) -> CaseResult:
        (result,) = self.report.results
        return result

    @property
    def verdicts(self) -> list[Verdict]:
        return [result.verdict for result in self.report.results]

    def repeats(self) -> list[str]:
        """The commands on stdout that repeat a result."""
        return re.findall(r"^  repeat  (.+)$", self.done.stdout, re.MULTILINE)


def verify(folder: Path, *args: str | Path) -> Run:
    """`mla-verify kernels ARGS` on the CPU. Both files must hold one verdict for every planned case, and the same."""
    json_path, junit_path = folder / "report.json", folder / "report.xml"
    done = invoke("kernels", *args, "--device", "cpu", "--json", json_path, "--junit", junit_path)
    report = read_json(json_path)
    planned = [(entry.case, entry.kernel) for entry in report.plan]
    assert planned
    assert [(result.case, result.kernel) for result in report.results] == planned
    assert report.exit_code == done.exit_code
    assert f"of {len(planned)} planned cases decided" in done.stdout
    root = ElementTree.parse(junit_path).getroot()
    cases = [(case.get("name"), case.get("classname")) for case in root.iter("testcase")]
    assert (Counter(cases), root.get("tests")) == (Counter(planned), str(len(planned)))
    for element, verdicts in _JUNIT.items():
        wanted = Counter(r.verdict.value for r in report.results if r.verdict.value in verdicts)
        assert Counter(found.get("type") for found in root.iter(element)) == wanted
    # What was decided against a kernel says why and how to see it again; what passed needs no reason.
    assert all(bool(result.reason) == (result.verdict is not Verdict.PASS) for result in report.results)
    return Run(done, report)


def cases(*ids: str) -> list[str]:
    """--case ID for each."""
    return [word for case in ids for word in ("--case", case)]
