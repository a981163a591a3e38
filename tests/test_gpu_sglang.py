"""SGLang's kernels natively on a GPU, through the product's own command: `pytest -m gpu`."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mla_verify.kernels.sglang import SGLangDecode, SGLangExtend
from tests.cli_helper import Result, invoke

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed"),
]
NEEDLE = "needle-s0"
PASSES = {
    "sglang-decode": (
        f"decode-absorbed-h16-q1.kv257+q1.kv256-p16-fp16-{NEEDLE}",
        "decode-absorbed-h128-4xq1.kv4096-p1-bf16-unequal-fused-s0",
    ),
    "sglang-write-decode": (f"decode-absorbed-h16-2xq1.kv200-p16-bf16-{NEEDLE}",),
    "sglang-extend": (
        f"spec-absorbed-h16-q4.kv200+q2.kv512-p16-bf16-{NEEDLE}",
        "prefix-absorbed-h16-q17.kv3000-p1-fp16-normal-fused-s0",
    ),
    "sglang-extend-mha": ("mixed-mha-h16-q33.kv200+q64.kv64-ragged-bf16-unequal-s0",),
    "sglang-set-mla-kv-buffer-tma": tuple(
        f"append-write-h1-q{n}.kv{n}-p16-bf16-{last}"
        for n, last in (
            (1, "rows-s0"),
            (767, "rows-s0"),
            (768, "rows-fused-s0"),
            (1025, "repeated-s0"),
            (8192, "rows-s0"),
        )
    ),
    "sglang-concat-k": tuple(
        f"keys-concat-h128-q129.kv129-ragged-bf16-rows{layout}-s0" for layout in ("", "-fused", "-transposed")
    ),
    "sglang-concat-absorb-q": tuple(
        f"queries-concat-h16-q129.kv129-ragged-bf16-rows{layout}-s0" for layout in ("", "-fused", "-transposed")
    ),
}


def run(folder: Path, kernel: str, *cases: str) -> tuple[Result, list[dict[str, Any]]]:
    named = [word for case in cases for word in ("--case", case)]
    report = folder / "report.json"
    done = invoke("kernels", "--kernel", kernel, *named, "--device", "cuda", "--json", str(report))
    return done, json.loads(report.read_text())["results"]


@pytest.mark.parametrize("kernel", PASSES)
def test_each_kernel_passes_natively(kernel: str, tmp_path: Path) -> None:
    done, results = run(tmp_path, kernel, *PASSES[kernel])
    assert done.exit_code == 0, done.stdout
    assert [result["verdict"] for result in results] == ["PASS"] * len(PASSES[kernel])
    assert not any("interpreted" in result["ran"] for result in results)


def test_the_triton_write_passes_or_says_that_its_size_goes_to_the_other_kernel(tmp_path: Path) -> None:
    cases = [f"append-write-h1-q{n}.kv{n}-p16-bf16-rows-s0" for n in (767, 768)]
    _, results = run(tmp_path, "sglang-set-mla-kv-buffer", *cases)
    assert results[0]["verdict"] == "PASS" or "for every size" in results[0]["reason"]
    assert results[1]["verdict"] == "UNSUPPORTED"
    assert "takes its JIT CUDA kernel" in results[1]["reason"]


@pytest.mark.parametrize(
    ("kernel", "fact", "shown"),
    [
        (SGLangDecode, {"p_dtype": "fp32"}, "out: "),
        (SGLangExtend, {"p_dtype": "fp32"}, "out: "),
        (SGLangExtend, {"tensor_core_k": None}, "lse: "),
    ],
)
def test_without_one_of_its_facts_an_honest_kernel_has_unexplained_errors(
    kernel: type[Any], fact: dict[str, Any], shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contract = kernel.contract
    case = next(case for case in PASSES[kernel.name] if NEEDLE in case)
    monkeypatch.setattr(
        kernel, "contract", replace(contract, facts=lambda dtype: replace(contract.facts(dtype), **fact))
    )
    done, _ = run(tmp_path, kernel.name, case)
    assert done.exit_code == 1
    assert shown in done.stdout
