"""How a GPU's arithmetic errs where no standard says it: tensor cores, exp2, log2 and division, as Triton has them.

    python -m benchmarks.tensor_cores --out docs/evidence/tensor-cores.json

A minute on one GPU. docs/error-model.md says what the constants are that these figures stand behind.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_verify.emulate import tensor_core_dot

U = 2.0**-24  # unit round-off of fp32
STEP = 16  # products that one instruction sums, of 16-bit operands
COLUMNS = 64


@triton.jit
def _dot(a, b, out, ROWS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, DIM, CHUNK):
        dims = first + tl.arange(0, CHUNK)
        left = tl.load(a + tl.program_id(0) * ROWS * DIM + rows[:, None] * DIM + dims[None, :])
        right = tl.load(b + columns[:, None] * DIM + dims[None, :])
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    at = tl.program_id(0) * ROWS * COLUMNS + rows[:, None] * COLUMNS + columns[None, :]
    tl.store(out + at, acc)


@triton.jit
def _functions(x, y, exp2, log2, quotient, nearest, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + at)
    other = tl.load(y + at)
    tl.store(exp2 + at, tl.exp2(value))
    tl.store(log2 + at, tl.log2(other))
    tl.store(quotient + at, value / other)
    tl.store(nearest + at, tl.div_rn(value, other))


def operands(dim: int, rows: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Kinds of a [rows, dim] and b [COLUMNS, dim], by how the partial sums of their products grow."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(rows, dim, generator=generator), torch.randn(COLUMNS, dim, generator=generator)
    yield "random signs", a, b
    yield "one sign", a.abs(), b.abs()
    yield "one sign, negative", -a.abs(), b.abs()
    yield "random signs about a mean", a + 0.3, b + 0.3
    large = torch.full((dim,), 1 / 64)
    large[:STEP] = 64.0
    yield "large first, random signs", a * large, b
    yield "large first, one sign", a.abs() * large, b.abs()


def measure_dot(dtype: torch.dtype, dim: int, block: int) -> list[dict[str, Any]]:
    """Error against the exact sum, as a multiple of u times the sum of the partial sums after each instruction."""
    found = []
    for kind, a, b in operands(dim, 64 * 32):
        a, b = a.to("cuda", dtype), b.to("cuda", dtype)
        out = torch.empty(len(a), COLUMNS, dtype=torch.float32, device="cuda")
        kernel = _dot[(len(a) // block,)](a, b, out, block, dim, COLUMNS, min(dim, 64), num_warps=4)
        instruction = "wgmma" if "wgmma" in kernel.asm["ptx"] else "mma"
        products = a.double().view(-1, 1, dim // STEP, STEP) * b.double().view(1, COLUMNS, dim // STEP, STEP)
        partial = products.sum(-1).cumsum(-1)
        error = out.double() - partial[..., -1]
        some = slice(0, 256)
        differs = int((tensor_core_dot(a[some].float(), b.float().T) != out[some]).sum())
        total = U * partial.sum(-1)
        slope = float(-(error * total).sum() / total.square().sum())
        rest = error + slope * total
        steps = dim // STEP
        typical = U * partial.abs().amax(-1) * steps
        found.append(
            {
                "kind": kind,
                "instruction": instruction,
                "dtype": str(dtype).removeprefix("torch."),
                "dim": dim,
                "not_as_emulated": differs,  # of 256 x COLUMNS results
                # error = -cut * u * sum of partial sums + rest
                "cut": round(slope, 3),
                # of the largest partial sum times u, times the square root of the steps
                "rest_rms": round(float((rest / (typical / steps**0.5)).square().mean().sqrt()), 3),
                "rest_mean": round(float((rest / (typical / steps**0.5)).mean()), 3),
                "error_rms_u_of_result": round(float((error / (U * partial[..., -1])).abs().median()), 2),
            }
        )
    return found


def measure_functions() -> dict[str, Any]:
    """Errors of what softmax needs besides: in u of the result; of log2 near 1 absolute, in 2^-22."""
    n, block = 1 << 22, 1024
    generator = torch.Generator().manual_seed(1)
    x = -30 * torch.rand(n, generator=generator)
    y = torch.exp2(20 * torch.rand(n, generator=generator))
    y[: n // 4] = 1 + torch.rand(n // 4, generator=generator)
    x, y = x.cuda(), y.cuda()
    results = [torch.empty_like(x) for _ in range(4)]
    _functions[(n // block,)](x, y, *results, block)
    exact = (torch.exp2(x.double()), torch.log2(y.double()), x.double() / y.double(), x.double() / y.double())
    found: dict[str, Any] = {}
    for name, result, wanted in zip(("exp2", "log2", "division", "div_rn"), results, exact, strict=True):
        error = (result.double() - wanted) / (U * wanted.abs().clamp_min(1e-300))
        if name == "log2":
            near = wanted < 1
            absolute = (result.double() - wanted)[near] * 2**22
            found["log2, absolute below 1, in 2^-22"] = _summary(absolute)
            error = error[~near]
        found[f"{name}, relative, in u"] = _summary(error)
    return found


def _summary(error: Tensor) -> dict[str, float]:
    return {
        "max": round(float(error.abs().max()), 3),
        "rms": round(float(error.square().mean().sqrt()), 3),
        "mean": round(float(error.mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    dots = [
        row
        for dtype in (torch.bfloat16, torch.float16)
        for block in (16, 64)
        for dim in (64, 576, 4096)
        for row in measure_dot(dtype, dim, block)
    ]
    document = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name(),
        "command": f"python -m benchmarks.tensor_cores {' '.join(sys.argv[1:])}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "dots": dots,
        "functions": measure_functions(),
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    for row in dots:
        print(row)
    for name, row in document["functions"].items():
        print(name, row)


if __name__ == "__main__":
    main()
