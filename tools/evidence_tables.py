"""Tables made from the recorded measurements in docs/evidence/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"


def read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((EVIDENCE / name).read_text())
    return data


def origin(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return f"{data['date']}, {data['machine']}, {versions}: `{data['command']}`"


def error_regimes() -> tuple[Sequence[str], list[list[str]], str]:
    """False alarms and z of the honest runs."""
    data = read("error-model.json")
    header = ["dtype", "regime", "runs", "false alarms", "rms z", "max z", "slope", "LSE rms z", "LSE max z"]
    keys = ("dtype", "regime", "runs", "false_alarms", "out_rms_z", "out_max_z", "slope_max", "lse_rms_z", "lse_max_z")
    rows = [[str(row[key]) for key in keys] for row in data["regimes"]]
    return header, rows, origin(data)


def error_rules() -> tuple[Sequence[str], list[list[str]], str]:
    """Honest runs rejected and faults found, by rule."""
    data = read("error-model.json")
    faults = list(data["rules"][0]["found"])
    rows = []
    for row in data["rules"]:
        found = [f"{row['found'][fault]} of {row['runs']}" for fault in faults]
        rows.append([row["dtype"], row["rule"], f"{row['honest_rejected']} of {row['runs']}", *found])
    return ["dtype", "rule", "honest runs rejected", *faults], rows, origin(data)


def tensor_cores() -> tuple[Sequence[str], list[list[str]], str]:
    """What an instruction cuts off, by how its partial sums grow; mma and wgmma are the same."""
    data = read("tensor-cores.json")
    dims = sorted({row["dim"] for row in data["dots"]})
    found: dict[tuple[str, str], dict[int, set[float]]] = {}
    for row in data["dots"]:
        found.setdefault((row["dtype"], row["kind"]), {}).setdefault(row["dim"], set()).add(row["cut"])
    rows = [[*key, *(" or ".join(map(str, by_dim[dim])) for dim in dims)] for key, by_dim in found.items()]
    total = sum(row["not_as_emulated"] for row in data["dots"])
    header = ["operands", "products", *(f"u cut off an instruction, {dim} dims" for dim in dims)]
    return header, rows, f"Results that differ from the emulation in any bit: {total}. {origin(data)}"


def gpu_functions() -> tuple[Sequence[str], list[list[str]], str]:
    """Errors of exp2, log2 and division."""
    data = read("tensor-cores.json")
    rows = [[name, *(str(row[key]) for key in ("max", "rms", "mean"))] for name, row in data["functions"].items()]
    return ["function", "largest error", "rms", "mean"], rows, origin(data)


def measured() -> tuple[Sequence[str], list[list[str]], str]:
    """The figures of benchmarks/measure.py."""
    data = read("measured.json")
    smoke = data["smoke"]
    stages = ", ".join(f"{stage} {seconds * 1000:.0f}" for stage, seconds in smoke["seconds_per_case"].items())
    rows = [
        [f"smoke suite, {smoke['cases']} cases, wall time", f"{smoke['wall_seconds']} s"],
        ["smoke suite, peak memory", f"{smoke['peak_memory_mib']} MiB"],
        ["milliseconds per case by stage", stages],
        *([f"start-up, `{name}`", f"{seconds} s"] for name, seconds in data["start_up_seconds"].items()),
        ["128 heads x 131,072 keys, memory beyond the inputs", f"{data['long_context']['gib_beyond_inputs']} GiB"],
    ]
    for shape, rate in data["reference_gflops"].items():
        share = rate["with sums"] / rate["matmul"]
        text = f"{rate['with sums']} with the model's sums, {rate['output alone']} without, matmul {rate['matmul']}"
        rows.append([f"float64 GFLOP/s, {shape}", f"{text} ({share:.0%})"])
    return ["what", "figure"], rows, origin(data)
