"""Figures of the tool itself: suite time and memory, seconds by stage, the reference's rate, start-up time.

    python -m benchmarks.measure --out docs/evidence/measured.json
    python -m benchmarks.measure --device cuda --out docs/evidence/measured-h200.json

Run it on an idle machine; each figure is the best of a few, the suite runs once. About 2 minutes on two cores.
On a GPU: cases per second by stage, the reference's rate and peak memory (measure_gpu.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import measure_gpu
from benchmarks.measure_gpu import KERNELS, cases_per_second

ROOT = Path(__file__).parents[1]


def suite() -> dict[str, Any]:
    """The smoke suite as a user runs it: wall time, peak memory, seconds by stage and verdicts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "mla_verify", "kernels", "--device", "cpu", "--json", str(path)]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        wall = time.perf_counter() - started
        report = json.loads(path.read_text())
    stages: dict[str, float] = defaultdict(float)
    for result in report["results"]:
        for stage, seconds in result["seconds"].items():
            stages[stage] += seconds
    return {
        "exit_code": done.returncode,
        "cases": len(report["results"]),
        "wall_seconds": round(wall, 1),
        # Of the largest child process so far; no other one is as large.
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
        "seconds_per_case": {k: round(v / len(report["results"]), 4) for k, v in stages.items()},
    }


def best(call: Any, repeats: int = 5, finish: Any = None) -> float:
    """Seconds of the fastest of a few calls. finish: waits until what a call started has ended."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        if finish:
            finish()
        times.append(time.perf_counter() - started)
    return min(times)


def reference_rate(device: str = "cpu") -> dict[str, Any]:
    """float64 GFLOP/s of the reference with the error model's sums, and of torch.matmul on its own shapes, in turn."""
    import torch

    from mla_verify.kernels.contract import RoundingFacts
    from mla_verify.noise import weighings
    from mla_verify.reference.attention import attend_absorbed

    rates = {}
    finish = torch.cuda.synchronize if device == "cuda" else None
    larger = ((128, 131072, 1), (128, 4096, 64)) if device == "cuda" else ()
    for heads, kv_len, q_len in ((16, 4096, 1), (128, 4096, 1), (128, 16384, 1), (16, 1000, 65), *larger):
        g = torch.Generator().manual_seed(0)
        shapes = ((q_len, heads, 512), (q_len, heads, 64), (kv_len, 512), (kv_len, 64))
        x = [torch.randn(*shape, generator=g).bfloat16().to(device) for shape in shapes]
        sums = weighings(RoundingFacts("bf16", p_dtype="bf16"), (512, 64))
        rows = q_len * heads
        a, b = (torch.randn(*shape).double().to(device) for shape in ((rows, 576), (576, kv_len)))
        matmul = 2 * rows * kv_len * 576 / best(lambda a=a, b=b: a @ b, finish=finish)
        row = {"matmul": matmul / 1e9}
        # q.k and p.v; with the sums also (q k)^2, two weights times v and v^2, and direction.v.
        for name, weights, width in (("output alone", (), 576 + 512), ("with sums", sums, 2 * 576 + 6 * 512)):
            call = partial(attend_absorbed, *x, sm_scale=0.1, causal=True, weighings=weights)
            seconds = best(call, finish=finish)
            row[name] = 2 * rows * kv_len * width / seconds / 1e9
        rates[f"{heads} heads, {kv_len} keys, {q_len} queries"] = {k: round(v, 1) for k, v in row.items()}
    return rates


def start_up() -> dict[str, float]:
    """Median seconds of ten starts."""
    commands = {
        "--help": ["-m", "mla_verify", "--help"],
        "list suites": ["-m", "mla_verify", "list", "suites"],
        "python -c pass": ["-c", "pass"],
    }
    result = {}
    for name, args in commands.items():
        times = [
            best(lambda args=args: subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True), 1)
            for _ in range(10)
        ]
        result[name] = round(statistics.median(times), 3)
    return result


def memory_of_long_context() -> dict[str, float]:
    """Peak memory of 128 heads x 131,072 keys x 1 query beyond its inputs, with the error model's sums."""
    code = """
import resource, torch
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.noise import weighings
from mla_verify.reference.attention import attend_absorbed
x = [torch.randn(*s).bfloat16() for s in ((1, 128, 512), (1, 128, 64), (131072, 512), (131072, 64))]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attend_absorbed(*x, sm_scale=0.1, causal=True, weighings=weighings(RoundingFacts("bf16", p_dtype="bf16"), (512, 64)))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return {"gib_beyond_inputs": round(float(done.stdout), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernel", action="append", help="on a GPU: whose cases per second; repeatable")
    args = parser.parse_args()
    if args.device == "cuda":
        publish(gpu_figures(args.kernel or KERNELS), args.out)
        return
    started = start_up()
    smoke = suite()
    import torch

    figures = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": "python -m benchmarks.measure",
        "start_up_seconds": started,
        "smoke": smoke,
        "reference_gflops": reference_rate(),
        "long_context": memory_of_long_context(),
    }
    publish(figures, args.out)


def gpu_figures(kernels: Sequence[str]) -> dict[str, Any]:
    """What is measured on a GPU, and where."""
    import torch

    from mla_verify.environment import gpu_name, package_hash

    return {
        "date": date.today().isoformat(),
        "machine": f"{gpu_name()}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, {platform.system()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "package_hash": package_hash(),
        "command": " ".join(["python -m benchmarks.measure", *sys.argv[1:]]),
        "cases_per_second": cases_per_second(kernels),
        "reference_gflops": reference_rate("cuda"),
        "long_context": measure_gpu.memory_of_long_context(),
    }


def publish(figures: dict[str, Any], out: Path | None) -> None:
    """Print them, and write them where that was asked for."""
    text = json.dumps(figures, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
