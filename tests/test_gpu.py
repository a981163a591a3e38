"""On a CUDA device, through the product's own command: `pytest -m gpu`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mla_verify.formats import DTYPES, FORMATS
from mla_verify.kernels.triton_mla import TritonDecode
from mla_verify.noise import CONSTANTS
from tests.cli_helper import invoke

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[1]


TRITON = ("triton-decode", "triton-prefill", "triton-cache-write", "triton-write-decode")
NEEDLE = "decode-absorbed-h16-q1.kv257+q1.kv256-p16-fp16-needle-s0"


def test_the_kernels_that_come_with_the_package_pass_the_smoke_suite_on_a_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    names = ("torch-absorbed", "torch-mha", *TRITON)
    result = invoke("kernels", *(f"--kernel={name}" for name in names), "--device", "cuda", "--json", str(report))
    assert result.exit_code == 0, result.stdout
    data = json.loads(report.read_text())
    assert data["environment"]["gpu"]["name"]
    results = data["results"]
    assert {r["verdict"] for r in results if r["kernel"].startswith("torch")} == {"PASS"}
    # Nothing is left to a GPU here: what is not taken is of another phase.
    assert all(r["verdict"] == "PASS" or r["reason"].startswith("phase ") for r in results)
    assert {r["dtype"] for r in results if r["kernel"] == "triton-decode" and r["verdict"] == "PASS"} == set(DTYPES)
    assert all("native" in r["ran"] for r in results if r["kernel"] in TRITON and r["verdict"] == "PASS")


def test_without_the_fact_that_tensor_cores_cut_off_an_honest_kernel_has_an_unexplained_lse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contract = TritonDecode.contract
    rounding = replace(contract, facts=lambda dtype: replace(contract.facts(dtype), tensor_core_k=None))
    command = ("kernels", "--kernel", "triton-decode", "--case", NEEDLE, "--device", "cuda")
    assert invoke(*command).exit_code == 0
    monkeypatch.setattr(TritonDecode, "contract", rounding)
    result = invoke(*command)
    assert result.exit_code == 1
    assert "lse: max_z" in result.stdout


@pytest.mark.parametrize("block", [16, 64], ids=["mma", "wgmma"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_emulated_tensor_cores_give_the_bits_of_real_ones(dtype: str, block: int) -> None:
    from benchmarks.tensor_cores import measure_dot

    rows = measure_dot(FORMATS[dtype].torch_dtype, 576, block)
    assert {row["instruction"] for row in rows} == {"mma" if block == 16 else "wgmma"}
    assert {row["kind"]: row["not_as_emulated"] for row in rows if row["not_as_emulated"]} == {}
    # What the model charges: 0.6 u of the sum an instruction with random signs, at most 3.4 u with one.
    assert all(row["cut"] < CONSTANTS.chop_drift**0.5 for row in rows)
    assert all(row["cut"] < CONSTANTS.chop**0.5 for row in rows if row["kind"] == "random signs")


def test_a_users_kernel_runs_in_a_process_of_its_own_on_the_gpu(tmp_path: Path) -> None:
    names = ("examples/my_kernel.py:my_decode", "examples/my_kernel.py:my_cache_write")
    result = invoke("kernels", *(f"--kernel={ROOT / name}" for name in names), "--device", "cuda")
    assert result.exit_code == 0, result.stdout


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
