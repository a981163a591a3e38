"""Figures of the tool on a GPU: cases per second by stage, and peak device memory. Used by benchmarks/measure.py."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_verify.cases import CaseSpec

ROOT = Path(__file__).parents[1]

KERNELS = ("flashinfer-mla-fa2", "flashinfer-mla-fa3", "sglang-decode", "triton-decode")
# Small, as most cases of the suites are; many seeds of them.
CASES = (
    "decode-absorbed-h16-4xq1.kv256-p64-bf16-normal-s0",
    "decode-absorbed-h16-q1.kv1000-p64-bf16-mixed-s0",
    "decode-absorbed-h16-3xq1.kv129-p1-fp16-needle-s0",
)
WARM_SEEDS, SEEDS = 20, 220


def run(kernels: Sequence[str], seeds: int) -> dict[str, Any]:
    """The report of the product's command on CASES, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        report, summary = Path(folder) / "report.json", Path(folder) / "summary.json"
        command = [sys.executable, "-m", "mla_verify", "kernels", "--device", "cuda", "--seeds", str(seeds)]
        command += [word for kernel in kernels for word in ("--kernel", kernel)]
        command += [word for case in CASES for word in ("--case", case)]
        command += ["--json", str(report), "--summary", str(summary)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            return {"exit_code": done.returncode, "stderr": done.stderr[-400:]}
        found: dict[str, Any] = json.loads(report.read_text())
        return found | {"summary_bytes": summary.stat().st_size}


def rates(small: Mapping[str, Any], large: Mapping[str, Any], warm_seeds: int) -> dict[str, Any]:
    """Cases per second, start-up and compilation left out, and milliseconds per case by stage.

    small, large: reports of one command with few and with many seeds, which differ by the cases of the other seeds.
    """
    more = len(large["results"]) - len(small["results"])
    seconds = large["environment"]["seconds"] - small["environment"]["seconds"]
    warm = [r for r in large["results"] if CaseSpec.parse(r["case"]).seed >= warm_seeds]
    stages: dict[str, float] = defaultdict(float)
    for result in warm:
        for stage, taken in result["seconds"].items():
            stages[stage] += taken
    by_stage = {stage: round(1000 * taken / len(warm), 3) for stage, taken in stages.items()}
    total = 1000 * seconds / more
    return {
        "exit_code": large["exit_code"],
        "verdicts": len(large["results"]),
        "verdicts_per_second": round(more / seconds, 1),
        "ms_per_verdict": round(total, 3),
        "ms_by_stage": by_stage | {"other": round(total - sum(by_stage.values()), 3)},
        "whole_run_seconds": large["environment"]["seconds"],
    }


def cases_per_second(kernels: Sequence[str]) -> dict[str, Any]:
    """Each kernel on its own, and all together, where they share inputs and reference."""
    found: dict[str, Any] = {"cases": list(CASES), "seeds": SEEDS}
    able = []
    for kernel in kernels:
        small, large = (run([kernel], seeds) for seeds in (WARM_SEEDS, SEEDS))
        if "results" in small and "results" in large:
            found[kernel] = rates(small, large, WARM_SEEDS)
            able.append(kernel)
        else:
            found[kernel] = {"not_run": small.get("stderr") or large.get("stderr")}
    if len(able) > 1:
        found["together"] = rates(run(able, WARM_SEEDS), run(able, SEEDS), WARM_SEEDS)
    return found


def memory_of_long_context() -> dict[str, float]:
    """Peak device memory of 128 heads x 131,072 keys x 1 query beyond its inputs, with the error model's sums."""
    import torch

    from mla_verify.kernels.contract import RoundingFacts
    from mla_verify.noise import weighings
    from mla_verify.reference.attention import attend_absorbed

    shapes = ((1, 128, 512), (1, 128, 64), (131072, 512), (131072, 64))
    x = [torch.randn(*shape, device="cuda").bfloat16() for shape in shapes]
    sums = weighings(RoundingFacts("bf16", p_dtype="bf16"), (512, 64))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend_absorbed(*x, sm_scale=0.1, causal=True, weighings=sums)
    torch.cuda.synchronize()
    return {
        "gib_beyond_inputs": round((torch.cuda.max_memory_allocated() - before) / 2**30, 3),
        "gib_of_inputs": round(before / 2**30, 3),
    }
