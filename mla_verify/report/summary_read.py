"""The summary in a file (summary.py), believed only as far as its table bears it out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_verify.errors import UsageError
from mla_verify.report.summary import SUMMARY_VERSION, Summary, Why, render
from mla_verify.report.summary_kernels import KernelFacts
from mla_verify.report.summary_table import pairs_of

_HINT = "give a file that `mla-verify kernels --summary` of this version has written"


def read_summary(path: Path) -> Summary:
    """The summary in a file. Raises UsageError for anything else, and for counts that are not those of its table."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the summary {path}: {error}", _HINT) from error
    try:
        version = document["summary_version"]
        if version != SUMMARY_VERSION:
            raise UsageError(f"it has summary version {version!r}; this mla-verify reads {SUMMARY_VERSION}", _HINT)
        summary = _summary(document)
        again = json.loads(render(summary))
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is no summary: {type(error).__name__}: {error}", _HINT) from error
    difference = _first_difference(document, again)
    if difference:
        where, said, found = difference
        raise UsageError(f"{path}: {where} is {said}, and the table makes it {found}", "record the run again")
    _check_measured(path, summary)
    return summary


def _summary(document: Mapping[str, Any]) -> Summary:
    pairs = tuple(pairs_of(document["table"]))
    kernels = {name: KernelFacts.read(facts) for name, facts in document["kernels"].items()}
    unknown = {pair.kernel for pair in pairs} - set(kernels)
    twice = [key for key, n in Counter((pair.case, pair.kernel) for pair in pairs).items() if n > 1]
    if unknown or twice:
        what = f"no kernel {min(unknown)}" if unknown else f"{twice[0][0]} of {twice[0][1]} twice"
        raise UsageError(f"it has {what}", _HINT)
    return Summary(
        environments=tuple(document["environments"]),
        package_hash=document["package_hash"],
        commit=document["commit"],
        interrupted=bool(document["interrupted"]),
        open_questions=tuple(document["open_questions"]),
        unpaired=tuple(document["unpaired"]),
        pairs=pairs,
        kernels=kernels,
        why=tuple(Why(**why) for why in document["why"]),
    )


def _first_difference(said: Any, found: Any, where: str = "it") -> tuple[str, str, str] | None:
    """The first value in which two JSON documents differ, its place and both as text."""
    if isinstance(said, dict) and isinstance(found, dict):
        for key in [*said, *(key for key in found if key not in said)]:
            inside = key if where == "it" else f"{where}.{key}"
            if key not in said or key not in found:
                return inside, "there" if key in said else "not there", "there" if key in found else "not there"
            difference = _first_difference(said[key], found[key], inside)
            if difference:
                return difference
        return None
    same = said == found and isinstance(said, bool) == isinstance(found, bool)  # 1 is no true
    return None if same else (where, repr(said)[:200], repr(found)[:200])


def _check_measured(path: Path, summary: Summary) -> None:
    """What the table cannot make again must at least agree with it."""
    verdicts = Counter((pair.kernel, pair.verdict.value) for pair in summary.pairs)
    explained: Counter[tuple[str, str]] = Counter()
    for why in summary.why:
        explained[why.kernel, why.verdict] += why.count
    for key, count in verdicts.items():
        if explained[key] != (0 if key[1] == "PASS" else count):
            raise UsageError(
                f"{path}: {key[0]} has {count} {key[1]} and gives reasons for {explained[key]}", "record the run again"
            )
    for name, facts in summary.kernels.items():
        problem = facts.contradicts(summary.pairs_of(name))
        if problem:
            raise UsageError(f"{path}: {name}: {problem}", "record the run again")
