"""Every recorded summary in docs/evidence/ is read as the product reads it, and what it says is computed once more."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from mla_verify.report.summary import Summary
from mla_verify.report.summary_read import read_summary
from mla_verify.report.summary_table import Pair
from tools.merge_evidence import MAX_BYTES, hash_of_commit

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"

# Kernels of one library that share a job, by the beginning of their names. A kernel of none is a family of its own.
FAMILIES = (
    "flashinfer-mla",
    "flashinfer-ragged",
    "flashinfer-append",
    "flashinfer-concat",
    "flashinfer-merge",
    "sgl-merge",
    "sglang-merge",
    "sglang-decode",
    "sglang-extend",
    "sglang-set-mla-kv-buffer",
    "sglang-write-decode",
    "sglang-concat",
    "triton",
    "torch",
)


def family_of(kernel: str) -> str:
    return next((family for family in FAMILIES if kernel == family or kernel.startswith(f"{family}-")), kernel)


def is_summary(path: Path) -> bool:
    return "summary_version" in json.loads(path.read_text(encoding="utf-8"))


SUMMARIES = sorted(path for path in EVIDENCE.glob("*.json") if is_summary(path))
H200 = [path for path in SUMMARIES if path.name.startswith("h200-")]
PAGES = sorted(EVIDENCE.glob("*.md"))

a_summary = pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.name)


# What a file says


@a_summary
def test_counts_decision_and_exit_code_of_a_recorded_run_are_those_of_its_table(path: Path) -> None:
    summary = read_summary(path)  # which refuses anything else
    document = json.loads(path.read_text(encoding="utf-8"))
    # Once more, and without the product's own counting.
    letters: Counter[str] = Counter()
    for group in document["table"]:
        for kernels in group["cases"].values():
            for text in kernels.values():
                letters.update(text)
    counted: Counter[str] = Counter()
    for kernel in document["kernels"].values():
        counted.update(kernel["verdicts"])
    assert letters["P"] == counted["PASS"]
    assert letters["F"] + letters["R"] == counted["FAIL"]
    assert letters.total() == counted.total() == document["pairs"] == len(summary.pairs)
    wrong = sum(letters[letter] for letter in "FRWEC")
    assert (document["exit_code"] == 1) is (wrong > 0 and not document["interrupted"])
    assert (document["decision"] == "pass") is (document["exit_code"] == 0)


@a_summary
def test_a_recorded_run_is_small_enough_for_the_repository(path: Path) -> None:
    assert path.stat().st_size <= MAX_BYTES


@a_summary
def test_the_package_hash_of_a_recorded_run_is_that_of_the_commit_it_names(path: Path) -> None:
    summary = read_summary(path)
    assert summary.commit is not None, "tools/merge_evidence.py --commit names the source that ran"
    assert summary.package_hash is not None
    if not (ROOT / ".git").exists():
        pytest.skip("no git history here")
    known = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "-e", f"{summary.commit}^{{commit}}"], capture_output=True
    )
    if known.returncode:
        shallow = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=True
        )
        assert shallow.stdout.strip() == "true", f"no commit {summary.commit}"
        pytest.skip("a shallow clone, which lacks the commit")
    assert hash_of_commit(ROOT, summary.commit) == summary.package_hash


# What the runs on an H200 claim together


def h200() -> list[Summary]:
    if not H200:
        pytest.skip("no run on an H200 is recorded")
    return [read_summary(path) for path in H200]


def cases_by_family(summaries: list[Summary]) -> dict[str, set[str]]:
    """Distinct ids of compared cases."""
    found: dict[str, set[str]] = {}
    for summary in summaries:
        for pair in summary.pairs:
            if pair.elements(summary.kernels[pair.kernel].lse):
                found.setdefault(family_of(pair.kernel), set()).add(pair.case)
    return found


def seeds_by_template(summaries: list[Summary]) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for summary in summaries:
        for pair in summary.pairs:
            template, _, seed = pair.case.rpartition("-s")
            found.setdefault((template, pair.kernel), set()).add(seed)
    return found


def elements_by_case(summaries: list[Summary]) -> Counter[str]:
    total: Counter[str] = Counter()
    for summary in summaries:
        total.update(summary.elements_by_case())
    return total


def test_runs_on_an_h200_were_made_on_one() -> None:
    for summary in h200():
        for environment in summary.environments:
            assert "H200" in environment["gpu"]["name"]


def test_runs_on_an_h200_take_ten_seeds_or_more_of_every_case() -> None:
    few = {key: len(seeds) for key, seeds in seeds_by_template(h200()).items() if len(seeds) < 10}
    assert few == {}


def test_runs_on_an_h200_compare_a_thousand_million_elements_and_no_case_has_more_than_one_percent_of_them() -> None:
    elements = elements_by_case(h200())
    assert elements.total() >= 10**9
    case, largest = elements.most_common(1)[0]
    assert largest <= elements.total() / 100, case


def test_runs_on_an_h200_compare_five_hundred_cases_or_more_of_each_family_of_kernels() -> None:
    few = {family: len(cases) for family, cases in cases_by_family(h200()).items() if len(cases) < 500}
    assert few == {}


def test_every_wrong_result_on_an_h200_is_a_finding_that_the_evidence_page_names() -> None:
    named = set(re.findall(r"[a-z]+-[a-z]+-h\d[\w.+-]*-s\d+", "\n".join(page.read_text() for page in PAGES)))
    wrong = {(pair.kernel, pair.case) for summary in h200() for pair in summary.pairs if pair.verdict.wrong}
    text = "\n".join(page.read_text() for page in PAGES)
    for kernel in {kernel for kernel, _ in wrong}:
        mine = {case for name, case in wrong if name == kernel}
        assert kernel in text, f"{kernel} is wrong in {len(mine)} cases, of which no page of the evidence speaks"
        assert mine & named, f"no page of the evidence names a case in which {kernel} is wrong"


# The helpers above


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("flashinfer-mla-fa3", "flashinfer-mla"),
        ("flashinfer-append", "flashinfer-append"),
        ("sglang-decode", "sglang-decode"),
        ("sglang-set-mla-kv-buffer-tma", "sglang-set-mla-kv-buffer"),
        ("something-new", "something-new"),
    ],
)
def test_family_of_a_kernel(kernel: str, family: str) -> None:
    assert family_of(kernel) == family


def test_every_kernel_of_the_table_that_shares_a_name_shares_its_family() -> None:
    from mla_verify.kernels import KERNELS

    assert {family_of(name) for name in KERNELS} >= {"torch", "triton", "sglang-decode", "sglang-extend"}


def test_cases_are_counted_once_in_a_family_and_only_where_they_were_compared() -> None:
    from mla_verify.report.summary_kernels import KernelFacts

    facts = KernelFacts(False, False, False, None, (), None, {}, {}, {})
    case = "decode-absorbed-h16-q1.kv64-p64-bf16-normal-s{}"
    letters = {("flashinfer-mla-fa2", 0): "P", ("flashinfer-mla-fa3", 0): "P", ("flashinfer-mla-fa3", 1): "U"}
    pairs = tuple(Pair(case.format(s), k, letter, "decode", "bf16", False) for (k, s), letter in letters.items())
    kernels = {kernel: facts for kernel, _ in letters}
    summary = Summary(({},), None, None, False, (), (), pairs, kernels, ())
    assert cases_by_family([summary, summary]) == {"flashinfer-mla": {case.format(0)}}
    assert elements_by_case([summary, summary])[case.format(0)] == 4 * 16 * 512
    assert seeds_by_template([summary])[case.removesuffix("-s{}"), "flashinfer-mla-fa3"] == {"0", "1"}
