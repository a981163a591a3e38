"""Kernels that need another GPU are listed with the reason, and asking for one is no typing error and no green run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_verify.kernels import KERNELS, load_kernel, other_gpus
from mla_verify.kernels.other_gpus import NeedsOtherGPU
from mla_verify.results import Verdict
from tests.cli_helper import invoke
from tests.kernels_helper import verify

NAMES = {
    "flashinfer-mla-cutlass": "10.0",
    "flashinfer-mla-trtllm-gen": "10.0",
    "flashinfer-mla-cute-dsl": "10.0",
    "flashinfer-mla-xqa": "12.0",
    "sglang-cutlass-mla": "10.0",
}
DECODE = "decode-absorbed-h16-q1.kv64-p64-bf16-normal-s0"


@pytest.fixture
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*NAMES, "torch-absorbed")
    monkeypatch.setattr("mla_verify.kernels.KERNELS", {name: KERNELS[name] for name in names})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def on(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    major, minor = map(int, capability.split("."))
    monkeypatch.setattr(other_gpus, "capability", lambda: (major, minor))
    monkeypatch.setattr(other_gpus, "this_gpu", lambda: f"this is an NVIDIA H200, SM {capability}")


@pytest.mark.parametrize(("name", "capability"), NAMES.items())
def test_each_names_the_gpu_it_needs_and_the_one_that_is_here(
    name: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = load_kernel(name)
    needed = f"needs an SM{capability.replace('.', '')} GPU"
    assert kernel.missing() is None  # no library makes up for the GPU
    assert str(kernel.why_unavailable("cpu")).startswith(needed)
    on(monkeypatch, "9.0")
    why = str(kernel.why_unavailable("cuda"))
    assert why.startswith(needed) and why.endswith("; this is an NVIDIA H200, SM 9.0")


@pytest.mark.parametrize(("name", "capability"), NAMES.items())
def test_on_the_right_gpu_the_answer_is_that_there_is_no_adapter(
    name: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, capability)
    assert str(load_kernel(name).why_unavailable("cuda")).startswith("mla-verify has no adapter for it yet")


def test_the_table_of_kernels_and_this_test_name_the_same() -> None:
    found = {name for name in KERNELS if isinstance(load_kernel(name), NeedsOtherGPU)}
    assert found == set(NAMES)


@pytest.mark.usefixtures("only_these")
def test_the_list_shows_each_in_three_lines_without_a_contract_it_does_not_have() -> None:
    blocks = dict(block.split("  ", 1) for block in invoke("list", "kernels").stdout.strip().split("\n\n"))
    for name in NAMES:
        state, *lines = blocks[name].splitlines()
        assert state.startswith("unavailable on cpu: needs an SM1")
        assert [line.split()[0] for line in lines] == ["API", "GPUs"]
        assert "mla" in lines[0] and "SM 1" in lines[1]
    assert "phases" in blocks["torch-absorbed"]


@pytest.mark.usefixtures("only_these")
def test_a_run_notes_them_once_for_each_gpu_and_is_green_without_them() -> None:
    done = invoke("kernels", "--case", DECODE, "--device", "cpu")
    assert done.exit_code == 0
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2
    assert all(any(name in note for note in notes) for name in NAMES)


@pytest.mark.usefixtures("only_these")
@pytest.mark.parametrize("flag", ["--kernel", "--require"])
@pytest.mark.parametrize("name", NAMES)
def test_asking_for_one_ends_inconclusive_with_the_reason(name: str, flag: str, tmp_path: Path) -> None:
    run = verify(tmp_path, flag, name, "--kernel", "torch-absorbed", "--case", DECODE)
    assert run.exit_code == 3
    verdicts = {result.kernel: result.verdict for result in run.report.results}
    assert verdicts == {"torch-absorbed": Verdict.PASS, name: Verdict.UNSUPPORTED}
    assert any(name in reason and "needs an SM1" in reason for reason in run.report.reasons)
    assert f"{name} is " in run.done.stderr and "unavailable here" in run.done.stderr
