"""GPU kernels that are called wrongly must FAIL, each fault for each kernel that can have it: `pytest -m gpu`.

tests/test_flashinfer_kernels.py shows the same on a CPU, with a stand-in for FlashInfer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_helper import invoke
from tests.gpu_helper import needs
from tests.wrong_gpu_calls import KERNELS

FILE = Path(__file__).with_name("wrong_gpu_calls.py")
# Two requests, for pages to be swapped between them; several queries, for the mask. Decode, paged and ragged.
CASES = tuple(
    f"{case}-fp16-{regime}-s0"
    for case in (
        "decode-absorbed-h16-q1.kv300+q1.kv95-p64",
        "prefix-absorbed-h16-q17.kv300+q31.kv95-p64",
        "prefix-mha-h16-q17.kv300+q31.kv95-ragged",
    )
    for regime in ("needle", "mixed")
)
RIGHT = tuple(name for name in KERNELS if name.startswith("right_"))


def verdicts(
    names: tuple[str, ...], cases: tuple[str, ...], device: str, folder: Path
) -> tuple[int, dict[str, set[str]], dict[str, str]]:
    """`mla-verify kernels` on these functions: exit code, verdicts by function, and what is said of the others."""
    report = folder / "report.json"
    kernels = [f"--kernel={FILE}:{name}" for name in names]
    done = invoke("kernels", *kernels, *(f"--case={case}" for case in cases), "--device", device, "--json", report)
    found: dict[str, set[str]] = {name: set() for name in names}
    reasons = dict.fromkeys(names, "")
    for result in json.loads(report.read_text())["results"]:
        name = result["kernel"].rpartition(":")[2]
        if result["verdict"] != "UNSUPPORTED":  # of another form or phase
            found[name].add(result["verdict"])
        if result["verdict"] not in ("PASS", "UNSUPPORTED"):
            checks = [check for comparison in result["comparisons"] for check in comparison["checks"]]
            reasons[name] += "\n".join([result["reason"], *(check["detail"] for check in checks)])
    return done.exit_code, found, reasons


def assert_told_apart(names: tuple[str, ...], cases: tuple[str, ...], device: str, folder: Path) -> None:
    """Every wrong call among `names` fails some case, every right one passes all."""
    right = tuple(name for name in names if name in RIGHT)
    wrong = tuple(name for name in names if name not in RIGHT)
    code, found, reasons = verdicts(right, cases, device, folder)
    assert (code, found) == (0, {name: {"PASS"} for name in right}), reasons
    code, found, reasons = verdicts(wrong, cases, device, folder)
    assert code == 1
    assert [name for name in wrong if "FAIL" not in found[name]] == []
    assert [name for name in wrong if not found[name] <= {"PASS", "FAIL"}] == []
    for name in wrong:
        if name.startswith("other_base_"):
            assert "0.6931 times the expected: base e where base 2 is" in reasons[name]


@pytest.mark.gpu
def test_a_wrong_call_of_any_real_kernel_fails_and_the_right_one_passes(tmp_path: Path) -> None:
    needs(*KERNELS.values())
    assert_told_apart(tuple(KERNELS), CASES, "cuda", tmp_path)


def test_there_is_each_fault_for_each_kernel_that_can_have_it() -> None:
    faults = ("scale", "one_key_less", "swapped_pages", "swapped_halves", "other_mask", "other_base")
    left_out = {
        # Ragged keys have no pages; decode has no mask and returns no LSE.
        ("flashinfer-ragged-fa2", "swapped_pages"),
        ("flashinfer-ragged-fa3", "swapped_pages"),
        ("sglang-decode", "other_mask"),
        ("sglang-decode", "other_base"),
    }
    kernels = set(KERNELS.values())
    assert kernels == {
        "flashinfer-mla-fa2",
        "flashinfer-mla-fa3",
        "flashinfer-ragged-fa2",
        "flashinfer-ragged-fa3",
        "sglang-decode",
    }
    expected = {f"{fault}_{k.replace('-', '_')}" for k in kernels for fault in faults if (k, fault) not in left_out}
    assert {name for name in KERNELS if name not in RIGHT} == expected
    assert len(RIGHT) == len(kernels)
