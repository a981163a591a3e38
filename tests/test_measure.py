"""Figures that benchmarks/measure.py takes on a GPU, from reports made by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.measure_gpu import CASES, rates
from mla_verify.cases import CaseSpec


def report(seeds: int, start_up: float, first: float, warm: float) -> dict[str, Any]:
    """The first case of a kernel compiles."""
    results = [
        {
            "case": CaseSpec.parse(case).with_seed(seed).id,
            "seconds": {"kernel": warm if seed else first, "inputs": 0.001},
        }
        for case in CASES
        for seed in range(seeds)
    ]
    seconds = start_up + sum(result["seconds"]["kernel"] + 0.003 for result in results)
    return {"exit_code": 0, "environment": {"seconds": seconds}, "results": results}


def test_rates_leave_out_start_up_and_compilation() -> None:
    small, large = (report(seeds, start_up=12.0, first=30.0, warm=0.002) for seeds in (5, 25))
    found = rates(small, large, warm_seeds=5)
    assert found["verdicts_per_second"] == 200.0
    assert found["ms_by_stage"] == {"kernel": 2.0, "inputs": 1.0, "other": 2.0}
    assert found["verdicts"] == 75


def test_measured_cases_are_small_decode_cases() -> None:
    for case in CASES:
        spec = CaseSpec.parse(case)
        assert spec.phase == "decode"
        assert spec.num_kv_tokens * spec.num_heads <= 2**16
