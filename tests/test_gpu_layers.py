"""Form layer through real kernels on a CUDA device, by the product's own command: `pytest -m gpu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_helper import invoke
from tests.gpu_helper import needs

pytestmark = pytest.mark.gpu

DECODE = "decode-layer-h16-q1.kv513+q1.kv0+q1.kv64-p{}-{}-normal-s0"
PREFIX = "prefix-layer-h16-q33.kv257+q5.kv64-p{}-{}-{}-s0"
PREFILL = "prefill-layer-h128-q33.kv33+q9.kv9-p64-{}-normal-s0"
PAGED = (1, 64)
LIBRARIES = {
    "flashinfer": ("flashinfer-layer-absorbed", "flashinfer-layer-expanded"),
    "sglang": ("sglang-layer-decode", "sglang-layer-absorbed", "sglang-layer-expanded"),
    "torch": ("torch-layer-absorbed", "torch-layer-expanded"),
}


def cases(dtype: str) -> list[str]:
    ids = [DECODE.format(p, dtype) for p in PAGED] + [PREFILL.format(dtype)]
    ids += [PREFIX.format(p, dtype, regime) for p in PAGED for regime in ("normal", "needle", "mixed")]
    return [word for case in ids for word in ("--case", case)]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_absorbed_and_expanded_through_real_kernels_are_the_layer(library: str, dtype: str, tmp_path: Path) -> None:
    needs(*LIBRARIES[library])
    report = tmp_path / "report.json"
    kernels = [f"--kernel={name}" for name in LIBRARIES[library]]
    result = invoke("kernels", *kernels, *cases(dtype), "--device", "cuda", "--json", str(report))
    assert result.exit_code == 0, result.stdout
    results = json.loads(report.read_text())["results"]
    # What a kernel leaves out is of a phase that is another's.
    assert all(r["verdict"] == "PASS" or r["reason"].startswith("phase ") for r in results), result.stdout
    for name in LIBRARIES[library]:
        ran = [r["ran"] for r in results if r["kernel"] == name and r["verdict"] == "PASS"]
        assert ran and all("torch.bmm" in what for what in ran)


WRONG = """
from dataclasses import replace

from mla_verify.kernels import load_kernel, mla_kernel

kernel = load_kernel({name!r})


@mla_kernel(kernel.contract)
def wrong(inputs, out):
    return kernel.run(replace(inputs, {weight}=inputs.{weight}.roll(1, 0)), out)
"""


@pytest.mark.parametrize("weight", ["w_kc", "w_vc"])
@pytest.mark.parametrize(
    "name", ["flashinfer-layer-absorbed", "flashinfer-layer-expanded", "sglang-layer-absorbed", "sglang-layer-expanded"]
)
def test_another_heads_weights_through_a_real_kernel_fail(name: str, weight: str, tmp_path: Path) -> None:
    needs(name)
    file = tmp_path / "wrong.py"
    file.write_text(WRONG.format(name=name, weight=weight))
    case = ("--case", PREFIX.format(64, "bf16", "normal"))
    result = invoke("kernels", "--kernel", f"{file}:wrong", *case, "--device", "cuda")
    assert result.exit_code == 1, result.stdout
    assert "out: " in result.stdout
