"""RunReport <-> JSON. Strict JSON: a non-finite number is the string "nan", "inf" or "-inf"."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from mla_verify.errors import UsageError
from mla_verify.results import (
    SCHEMA_VERSION,
    CaseResult,
    Check,
    Comparison,
    Location,
    Planned,
    RunReport,
    Verdict,
)


def to_json(report: RunReport) -> str:
    """The report as JSON text. `passed` of comparisons and checks is there for readers; it follows from the rest."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "decision": report.decision,
        "exit_code": report.exit_code,
        "reasons": report.reasons,
        "environment": report.environment,
        "plan": [asdict(planned) for planned in report.plan],
        "results": [_result(result) for result in report.results],
    }
    return json.dumps(plain(document), indent=1, allow_nan=False) + "\n"


def read_json(path: Path) -> RunReport:
    """The report in a file that `to_json` made. Raises UsageError for anything else."""
    hint = "give a file that `mla-verify kernels --json` of this version has written"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the report {path}: {error}", hint) from error
    try:
        document = json.loads(text)
        version = document["schema_version"]
        if version != SCHEMA_VERSION:
            raise UsageError(f"{path} has schema version {version!r}; this mla-verify reads {SCHEMA_VERSION}", hint)
        return _report(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is no report: {type(error).__name__}: {error}", hint) from error


def _result(result: CaseResult) -> dict[str, Any]:
    return vars(result) | {"comparisons": [_comparison(comparison) for comparison in result.comparisons]}


def _comparison(comparison: Comparison) -> dict[str, Any]:
    checks = [asdict(check) | {"passed": check.passed} for check in comparison.checks]
    return asdict(comparison) | {"passed": comparison.passed, "checks": checks}


def plain(value: Any) -> Any:
    """Only what JSON has. An unforeseen type becomes its text: a report must not be lost over one."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def _report(document: Mapping[str, Any]) -> RunReport:
    return RunReport(
        plan=tuple(Planned(planned["case"], planned["kernel"]) for planned in document["plan"]),
        results=tuple(_read_result(result) for result in document["results"]),
        environment=document["environment"],
        decision=document["decision"],
        exit_code=document["exit_code"],
        reasons=tuple(document["reasons"]),
    )


def _read_result(fields: Mapping[str, Any]) -> CaseResult:
    return CaseResult(
        **dict(fields)
        | {
            "verdict": Verdict(fields["verdict"]),
            "comparisons": tuple(_read_comparison(comparison) for comparison in fields["comparisons"]),
            "seconds": {stage: float(seconds) for stage, seconds in fields["seconds"].items()},
        }
    )


def _read_comparison(fields: Mapping[str, Any]) -> Comparison:
    return Comparison(
        tensor=fields["tensor"],
        checks=tuple(
            Check(check["name"], float(check["value"]), float(check["limit"]), check["detail"])
            for check in fields["checks"]
        ),
        max_abs_error=float(fields["max_abs_error"]),
        max_rel_error=float(fields["max_rel_error"]),
        rms_z=float(fields["rms_z"]),
        worst=_read_location(fields["worst"]) if fields["worst"] else None,
    )


def _read_location(fields: Mapping[str, Any]) -> Location:
    numbers = {name: float(fields[name]) for name in ("actual", "expected", "z")}
    return Location(**dict(fields) | numbers)
