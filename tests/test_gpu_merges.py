"""Merges of a chunked prefix on a CUDA device, through the product's own command: `pytest -m gpu`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_verify.cases import CaseSpec
from mla_verify.expected import dense_request
from mla_verify.inputs import make_inputs
from mla_verify.kernels.sglang_chunked import SGLangFlashInferMerge
from mla_verify.suites import suite_cases
from mla_verify.tensors import MHAInputs, output_buffers
from tests.cli_helper import invoke
from tests.gpu_helper import needs
from tests.kernels_helper import cases

pytestmark = pytest.mark.gpu

SOUND = ("sgl-merge", "sglang-merge", "flashinfer-merge")
CAUSE = "the output fits its parts merged with base-2 LSEs taken as natural ones (each LSE times 1.4427)"
# 64 new queries on 3,072 and on 512 cached keys, independent normal numbers and the scale of 192 dims.
NUMBERS = "prefix-mha-h16-q64.kv{}-ragged-bf16-normal-scale0.07216878364870322-s0"

# What an upstream repair would do: the LSE of FlashInfer's ragged attention, base 2, made natural before it is merged.
REPAIRED = """
import math
from dataclasses import replace
from importlib import import_module

from mla_verify.kernels import mla_kernel
from mla_verify.kernels.sglang_chunked import SGLangFlashInferMerge

WHOLE = 1 << 17  # SGLang's own budget: all cached keys are one chunk


def facts_of(chunk):
    return lambda dtype: replace(SGLangFlashInferMerge.contract.facts(dtype), chunk=chunk)


def repaired(inputs, out, chunk):
    runner = import_module("sglang.srt.layers.attention.flashinfer_mla_backend").FlashInferMhaChunkKVRunner
    raw = runner.forward

    def natural(*args, **kwargs):
        out, lse = raw(*args, **kwargs)
        return out, lse * math.log(2)

    runner.forward = natural
    try:
        return as_it_is(inputs, out, chunk)
    finally:
        runner.forward = raw


def as_it_is(inputs, out, chunk):
    kernel = SGLangFlashInferMerge()
    kernel.chunk = chunk
    return kernel.run(inputs, out)


CHUNKED = SGLangFlashInferMerge.contract
ONE_CHUNK = replace(CHUNKED, facts=facts_of(WHOLE))


@mla_kernel(CHUNKED)
def converted(inputs, out):
    return repaired(inputs, out, SGLangFlashInferMerge.chunk)


@mla_kernel(ONE_CHUNK)
def converted_whole(inputs, out):
    return repaired(inputs, out, WHOLE)


@mla_kernel(ONE_CHUNK)
def raw_whole(inputs, out):
    return as_it_is(inputs, out, WHOLE)
"""


def results(folder: Path, *args: str | Path) -> tuple[int, list[dict[str, Any]]]:
    report = folder / "report.json"
    done = invoke("kernels", *args, "--device", "cuda", "--json", report)
    assert report.exists(), done.stdout + done.stderr
    return done.exit_code, json.loads(report.read_text())["results"]


@pytest.fixture
def chunked_prefix_is_there() -> None:
    """SGLang's model code imports much that its kernels do not need."""
    needs("sglang-flashinfer-merge")


@pytest.mark.parametrize("name", SOUND)
def test_attention_in_chunks_merged_by_a_librarys_kernel_passes_the_standard_suite(name: str, tmp_path: Path) -> None:
    needs(name)
    exit_code, found = results(tmp_path, "--kernel", name, "--suite", "standard", "--dtype", "fp16", "--dtype", "bf16")
    decided = [r for r in found if r["verdict"] != "UNSUPPORTED"]
    assert [(r["case"], r["reason"]) for r in decided if r["verdict"] != "PASS"] == []
    assert exit_code == 0
    assert len(decided) >= 50
    assert any("merged by" in r["ran"] for r in decided)


@pytest.mark.usefixtures("chunked_prefix_is_there")
def test_sglangs_chunked_prefix_with_flashinfer_fails_and_the_cause_is_named(tmp_path: Path) -> None:
    name = "sglang-flashinfer-merge"
    exit_code, found = results(tmp_path, "--kernel", name, "--suite", "smoke")
    wrong = [r for r in found if r["verdict"] == "FAIL"]
    assert exit_code == 1
    # Smoke has no case in which one key has all the weight, and so its part in any base.
    assert {r["verdict"] for r in found} <= {"FAIL", "UNSUPPORTED"}
    assert len(wrong) >= 8
    assert [r["reason"] for r in wrong if not r["reason"].startswith(CAUSE)] == []
    assert all("merged by sgl_kernel.merge_state_v2" in r["ran"] for r in wrong)


@pytest.mark.usefixtures("chunked_prefix_is_there")
def test_with_the_lse_made_natural_sglangs_chunked_prefix_passes(tmp_path: Path) -> None:
    file, kernel = tmp_path / "repaired.py", SGLangFlashInferMerge()
    file.write_text(REPAIRED)
    specs = [case.spec for case in suite_cases("standard") if case.spec.form == "mha" and case.spec.dtype != "fp32"]
    taken = [s.id for s in specs if s.phase in kernel.contract.phases and kernel.why_not(s, "cuda") is None]
    assert len(taken) >= 50
    exit_code, found = results(tmp_path, "--kernel", f"{file}:converted", *cases(*taken))
    assert [(r["case"], r["reason"]) for r in found if r["verdict"] != "PASS"] == []
    assert (exit_code, len(found)) == (0, len(taken))


@pytest.mark.usefixtures("chunked_prefix_is_there")
@pytest.mark.parametrize(("keys", "low", "high"), [(3072, 0.075, 0.1), (512, 0.14, 0.18)])
def test_the_relative_error_of_the_wrong_base_is_what_was_measured_before(
    keys: int, low: float, high: float, tmp_path: Path
) -> None:
    """0.086 on 3,072 cached keys and 0.161 on 512, against 0.0028 with the LSE made natural."""
    file, case = tmp_path / "repaired.py", NUMBERS.format(keys + 64)
    file.write_text(REPAIRED)
    kernels = [f"--kernel={file}:{name}" for name in ("raw_whole", "converted_whole")]
    _, found = results(tmp_path, *kernels, *cases(case))
    assert [r["verdict"] for r in found] == ["FAIL", "PASS"]
    assert found[0]["reason"].startswith(CAUSE)

    functions: dict[str, Any] = {}
    exec(compile(REPAIRED, "repaired.py", "exec"), functions)
    inputs = make_inputs(CaseSpec.parse(case), "cuda")
    assert isinstance(inputs, MHAInputs)
    right = dense_request(inputs, 0).attend().out
    errors = []
    for name in ("raw_whole", "converted_whole"):
        out = functions[name](inputs, output_buffers(inputs, inputs.q.dtype).output).out.double()
        errors.append(float((out - right).norm() / right.norm()))
    assert low < errors[0] < high
    assert errors[1] < 0.004


def test_flashinfers_merge_given_natural_lses_fails_and_the_cause_is_named(tmp_path: Path) -> None:
    """Which is the other base: weights 2^lse of natural LSEs."""
    needs("flashinfer-merge")
    file = tmp_path / "natural.py"
    file.write_text(
        "import math\n"
        "from dataclasses import replace\n"
        "from mla_verify.kernels import mla_kernel\n"
        "from mla_verify.kernels.merges import FlashInferMerge\n"
        "from mla_verify.tensors import MLAOutput\n\n\n"
        "class Natural(FlashInferMerge):\n"
        "    def attend(self, part):\n"
        "        out, lse = super().attend(part)\n"
        "        return out, lse * math.log(2)\n\n\n"
        "@mla_kernel(replace(FlashInferMerge.contract, returns_lse=False))\n"
        "def natural(inputs, out):\n"
        "    return MLAOutput(Natural().run(inputs, out).out, None)\n"
    )
    case = "prefix-mha-h16-q17.kv300+q31.kv95-ragged-bf16-mixed-s0"
    _, (result,) = results(tmp_path, "--kernel", f"{file}:natural", *cases(case))
    assert result["verdict"] == "FAIL"
    assert "natural LSEs taken as base-2 ones (each LSE times 0.6931)" in result["reason"]
