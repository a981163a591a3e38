"""The evidence of docs/error-model.md: false alarms and z of honest runs, and what published rules do on the same runs.

    python -m benchmarks.error_model --runs 2000 --out docs/evidence/error-model.json

About 15 minutes on two cores. Prints one table; writes the counts as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import sys
import time
from collections import defaultdict
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.honest import HonestRun, honest_run
from mla_verify.cases import REGIMES
from mla_verify.compare import compare_output
from mla_verify.expected import dense_request
from mla_verify.formats import DTYPES
from mla_verify.tensors import MLAOutput


def baseline(run: HonestRun) -> Tensor:
    """Plain attention with every step stored in the case's dtype: what the 2x rule measures itself by."""
    dtype = run.output.out.dtype
    outs = []
    for b in range(run.inputs.num_requests):
        r = dense_request(run.inputs, b)
        k, v = (torch.cat(r.k, -1)[:, None], r.k[0][:, None]) if len(r.q) == 2 else r.k
        q = torch.cat(r.q, -1)
        heads = q.shape[1]
        k, v = (t.expand(-1, heads, -1).float() for t in (k, v))
        score = (torch.einsum("qhd,khd->hqk", q.float(), k).to(dtype).float() * r.sm_scale).to(dtype).float()
        hidden = torch.arange(len(k)) > (torch.arange(len(q)) + len(k) - len(q))[:, None]
        p = torch.softmax(score.masked_fill(hidden, -math.inf), -1).nan_to_num(0.0).to(dtype).float()
        outs.append(torch.einsum("hqk,khv->qhv", p, v).to(dtype))
    return torch.cat(outs)


def _close(actual: Tensor, expected: Tensor, atol: float, rtol: float) -> bool:
    return torch.allclose(actual, expected, rtol=rtol, atol=atol)


def _flashmla(actual: Tensor, expected: Tensor) -> bool:
    """Each element within 8e-4 absolutely or 2.01 / 128 relatively, and 1 - cosine-like similarity under 5e-6."""
    error = (actual - expected).abs()
    each = (error < 8e-4) | (error / expected.abs().clamp_min(1e-30) < 2.01 / 128)
    denominator = float((actual.square() + expected.square()).sum())
    similar = denominator < 1e-12 or 1 - 2 * float((actual * expected).sum()) / denominator < 5e-6
    return bool(each.all()) and similar


def published_rules(run: HonestRun, actual: Tensor) -> dict[str, bool]:
    """Whether each rule accepts `actual`. Rules as their projects' tests state them."""
    expected = run.expected.attention.out
    pt = baseline(run).double()
    # flash-attention: max error at most twice the plain computation's, and what fp32 arithmetic near 0.3 loses.
    slack = 2 * float(((expected.float() + 0.3 - 0.3).double() - expected.float().double()).abs().max())
    return {
        "1e-3 (FlashInfer)": _close(actual, expected, 1e-3, 1e-3),
        "1e-2 (FlashInfer)": _close(actual, expected, 1e-2, 1e-2),
        "FlashMLA": _flashmla(actual, expected),
        "2x (flash-attention)": float((actual - expected).abs().max())
        <= 2 * float((pt - expected).abs().max()) + slack,
    }


def mutants(run: HonestRun) -> dict[str, MLAOutput]:
    """Faulty outputs, each in place of the kernel's."""
    out, lse = run.output.out, run.output.lse
    lost = []
    for b in range(run.inputs.num_requests):
        r = dense_request(run.inputs, b)
        start, end = run.inputs.q_range(b)
        # The last query alone: its last key is every form's last key.
        last = replace(r, q=tuple(q[-1:] for q in r.q), k=tuple(k[:-1] for k in r.k), causal=False).attend()
        lost.append(torch.cat([out[start : end - 1], last.out.to(out.dtype)]))
    return {
        "zeros": MLAOutput(torch.zeros_like(out), lse),
        "constant": MLAOutput(torch.full_like(out, float(out.float().mean())), lse),
        "next head's output": MLAOutput(out.roll(1, dims=1), lse),
        "scale 1.005": MLAOutput((run.expected.attention.out * 1.005).to(out.dtype), lse),
        "last key lost": MLAOutput(torch.cat(lost), lse),
    }


def one(job: tuple[int, str, bool]) -> dict[str, Any]:
    """One run, as plain numbers."""
    number, dtype, with_rules = job
    run = honest_run(number, dtype)
    record: dict[str, Any] = {"number": number, "dtype": dtype, "regime": run.spec.regime, "kernel": run.kernel}
    record["case"] = run.spec.id
    record["failed"] = [f"{c.tensor} {k.name}" for c in run.comparisons for k in c.checks if not k.passed]
    for c in run.comparisons:
        record[c.tensor] = {"rms_z": c.rms_z, "elements": run.output.out.numel(), **{k.name: k.value for k in c.checks}}
    if with_rules:
        record["rules"] = published_rules(run, run.output.out.double())
        record["mutants"] = {
            name: {
                "mla-verify": not all(c.passed for c in compare_output(bad, run.expected, run.facts, run.inputs)),
                **{rule: not ok for rule, ok in published_rules(run, bad.out.double()).items()},
            }
            for name, bad in mutants(run).items()
        }
    return record


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    by: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for r in records:
        by[r["dtype"], r["regime"]].append(r)
    rows = []
    for dtype in DTYPES:
        for regime in REGIMES:
            group = by[dtype, regime]
            if not group:
                continue
            rms = math.sqrt(sum(r["out"]["rms_z"] ** 2 for r in group) / len(group))
            lses = [r["lse"] for r in group if "lse" in r]
            rows.append(
                {
                    "dtype": dtype,
                    "regime": regime,
                    "runs": len(group),
                    "false_alarms": sum(bool(r["failed"]) for r in group),
                    "out_rms_z": round(rms, 3),
                    "out_max_z": round(max(r["out"]["max_z"] for r in group), 2),
                    "slope_max": round(max(r["out"]["slope"] for r in group), 2),
                    "lse_rms_z": round(math.sqrt(sum(x["rms_z"] ** 2 for x in lses) / len(lses)), 3) if lses else None,
                    "lse_max_z": round(max(x["max_z"] for x in lses), 2) if lses else None,
                }
            )
    judged = [r for r in records if "rules" in r]
    rules = ["mla-verify", *(judged[0]["rules"] if judged else ())]
    table = []
    for dtype in DTYPES:
        mine = [r for r in judged if r["dtype"] == dtype]
        for rule in rules:
            wrong = sum(bool(r["failed"]) if rule == "mla-verify" else not r["rules"][rule] for r in mine)
            found = {name: sum(r["mutants"][name][rule] for r in mine) for name in (mine[0]["mutants"] if mine else ())}
            table.append({"dtype": dtype, "rule": rule, "runs": len(mine), "honest_rejected": wrong, "found": found})
    return {"regimes": rows, "rules": table, "alarms": [r for r in records if r["failed"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="of each dtype")
    parser.add_argument("--rules-every", type=int, default=10, help="published rules and mutants on every n-th run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # Counted down, so that the sampled runs take part in every regime: 10 and 9 regimes have no common factor.
    jobs = [(i, dtype, i % args.rules_every == 0) for i in range(args.runs) for dtype in DTYPES]
    started = time.perf_counter()
    with multiprocessing.Pool(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        records = []
        for record in pool.imap_unordered(one, jobs, chunksize=8):
            records.append(record)
            if len(records) % 200 == 0:
                print(f"{len(records)}/{len(jobs)} {time.perf_counter() - started:.0f} s", file=sys.stderr)
    summary = {
        "command": " ".join(["python -m benchmarks.error_model", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores, {platform.system()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": round(time.perf_counter() - started),
        **summarise(records),
    }
    for row in [*summary["regimes"], *summary["rules"], *summary["alarms"]]:
        print(row)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
