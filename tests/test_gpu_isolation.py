"""What a kernel does to its CUDA context, to the device or to its process costs its own case and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mla_verify.workers import close_workers
from tests.cli_helper import invoke

pytestmark = pytest.mark.gpu

CASE = "decode-absorbed-h16-q1.kv257+q1.kv256-p16-bf16-needle-s0"
BAD = CASE.replace("bf16", "fp16")
LATER = CASE.replace("-s0", "-s1")

KERNELS = """
import time

import torch, triton
import triton.language as tl
from examples.my_kernel import CONTRACT, my_decode
from mla_verify.kernels import mla_kernel


@triton.jit
def write_far_away(p):
    tl.store(p + tl.program_id(0).to(tl.int64) * 1_000_000_007, 1.0)


@triton.jit
def wait_for_ever(p):
    seen = tl.load(p, volatile=True)
    while seen == 0:
        seen = tl.load(p, volatile=True)
    tl.store(p + 1, seen)


def bad(inputs):
    return inputs.q_nope.dtype == torch.float16


@mla_kernel(CONTRACT)
def traps(inputs, out):
    if bad(inputs):
        write_far_away[(1000,)](out.out)
    return my_decode(inputs, out)


@mla_kernel(CONTRACT)
def spins_on_the_device(inputs, out):
    if bad(inputs):
        # More programs than fit at once, on every multiprocessor.
        wait_for_ever[(4096,)](torch.zeros(2, dtype=torch.int32, device=out.out.device))
    return my_decode(inputs, out)


@mla_kernel(CONTRACT)
def allocates_without_end(inputs, out):
    held = []
    while bad(inputs):
        held.append(torch.empty(1 << 30, dtype=torch.uint8, device=out.out.device))
    return my_decode(inputs, out)


@mla_kernel(CONTRACT)
def hangs_on_the_host(inputs, out):
    while bad(inputs):
        time.sleep(1)
    return my_decode(inputs, out)
"""


def results(folder: Path, *args: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and results of a run on the GPU."""
    report = folder / "report.json"
    done = invoke("kernels", *args, "--device", "cuda", "--json", str(report))
    assert report.exists(), done.stderr
    return done.exit_code, json.loads(report.read_text())["results"]


@pytest.mark.parametrize(
    ("kernel", "verdict", "reason", "exit_code"),
    [
        ("traps", "ERROR", r"the kernel raised \w+: .*(illegal memory access|CUDA error).*", 1),
        ("spins_on_the_device", "TIMEOUT", r"no result after 5 s \(--timeout\); its process was killed", 3),
        ("allocates_without_end", "NOT_RUN", r"out of memory in the kernel: CUDA out of memory.*", 3),
        ("hangs_on_the_host", "TIMEOUT", r"no result after 5 s \(--timeout\); its process was killed", 3),
    ],
)
def test_a_broken_kernel_costs_its_own_case_and_nothing_else(
    tmp_path: Path, kernel: str, verdict: str, reason: str, exit_code: int
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(KERNELS)
    names = (f"--kernel={file}:{kernel}", "--kernel=torch-absorbed")
    code, found = results(tmp_path, *names, *(f"--case={case}" for case in (CASE, BAD, LATER)), "--timeout", "5")
    verdicts = {(r["case"], r["kernel"].rpartition(":")[2]): r["verdict"] for r in found}
    # torch-absorbed runs after the broken one, on its case and on the next.
    assert [verdicts[case, "torch-absorbed"] for case in (CASE, BAD, LATER)] == ["PASS"] * 3
    assert [verdicts[case, kernel] for case in (CASE, BAD, LATER)] == ["PASS", verdict, "PASS"]
    assert code == exit_code
    (bad,) = (r for r in found if r["verdict"] != "PASS")
    assert re.fullmatch(reason, bad["reason"]), bad["reason"]
    if verdict == "TIMEOUT":
        assert bad["traceback"].lstrip().startswith("Stack (most recent call first)")


def test_built_in_kernels_run_in_another_process_than_the_reference(tmp_path: Path) -> None:
    from mla_verify.kernels import KERNELS as TABLE
    from mla_verify.kernels import load_kernel

    assert {name for name in TABLE if load_kernel(name, "cuda").own_process("cuda") is None} == set()
    code, found = results(tmp_path, "--kernel=torch-absorbed", "--kernel=triton-decode", f"--case={CASE}")
    assert (code, [r["verdict"] for r in found]) == (0, ["PASS"] * 2)


def test_after_the_workers_have_ended_no_process_of_theirs_holds_the_device(tmp_path: Path) -> None:
    results(tmp_path, "--kernel=torch-absorbed", f"--case={CASE}")
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    if not (before := subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()):
        pytest.skip("nvidia-smi shows no processes here")
    close_workers()
    after = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    assert len(after) < len(before)


def test_compiling_is_not_counted_against_the_time_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if find_spec("flashinfer") is None or find_spec("flashinfer_jit_cache") is not None:
        pytest.skip("needs FlashInfer that compiles its kernels")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))  # an empty cache
    close_workers()
    try:
        code, found = results(tmp_path, "--kernel=flashinfer-mla-fa2", f"--case={CASE}", "--timeout", "5")
    finally:
        close_workers()  # the next one has the usual cache
    assert (code, [r["verdict"] for r in found]) == (0, ["PASS"]), found
    assert found[0]["seconds"]["compile"] > 2
    assert found[0]["seconds"]["kernel"] < 5
