"""On a CUDA device, through the product's own command: `pytest -m gpu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_helper import invoke

pytestmark = pytest.mark.gpu


def test_torchs_kernels_pass_the_smoke_suite_on_a_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = invoke("kernels", "--device", "cuda", "--json", str(report))
    assert result.exit_code == 0, result.stdout
    data = json.loads(report.read_text())
    assert data["environment"]["gpu"]["name"]
    assert {r["verdict"] for r in data["results"]} == {"PASS"}


def test_the_reference_is_the_same_on_a_gpu_as_on_a_cpu() -> None:
    # TF32 or any other shortcut would differ from the seventh digit on.
    from mla_verify.cases import CaseSpec
    from mla_verify.expected import expect
    from mla_verify.inputs import make_inputs
    from mla_verify.kernels.contract import RoundingFacts

    facts = RoundingFacts(out_dtype="bf16", p_dtype="bf16", partial_dtype="bf16", max_splits=8)
    for case in (
        "mixed-absorbed-h16-q1.kv33+q5.kv100+q3.kv2-p16-bf16-mixed-s0",
        "prefix-mha-h16-q17.kv300-ragged-bf16-mixed-s0",
    ):
        spec = CaseSpec.parse(case)
        cpu, gpu = (expect(make_inputs(spec, device), [facts]) for device in ("cpu", "cuda"))
        for ours, theirs in ((cpu.attention.out, gpu.attention.out), (cpu.attention.lse, gpu.attention.lse)):
            seen = ours.isfinite()
            assert float((ours[seen] - theirs.cpu()[seen]).abs().max()) < 1e-12
        assert float((cpu.noise[facts].out / gpu.noise[facts].out.cpu() - 1).abs().max()) < 1e-6
