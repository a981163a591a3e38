"""Views, and caches past 2^31 and 2^32 elements, on a CUDA device: `pytest -m gpu`. Takes 25 GB of its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_verify import layout_suites
from mla_verify.report.json_report import read_json
from mla_verify.results import CaseResult, Verdict
from tests.cli_helper import invoke
from tests.kernels_helper import cases

pytestmark = pytest.mark.gpu
CUTS = Path(__file__).parent / "own_kernels/cuts_offsets.py"
IDS = [
    template.replace("-DT-", f"-{dtype}-")
    for template, dtypes, _ in (*layout_suites.SMOKE, *layout_suites.standard(), *layout_suites.full())
    for dtype in dtypes.split()
]


def results_of(folder: Path, kernels: tuple[str, ...], *ids: str) -> list[CaseResult]:
    named = [word for kernel in kernels for word in ("--kernel", kernel)]
    invoke("kernels", *named, *cases(*ids), "--device", "cuda", "--json", folder / "report.json")
    return list(read_json(folder / "report.json").results)


def test_our_triton_kernels_have_the_same_bits_wherever_things_lie(tmp_path: Path) -> None:
    far = [case for case in IDS if "-far3" in case]
    assert {layout for case in far for layout in ("far31", "far32") if layout in case} == {"far31", "far32"}
    results = results_of(tmp_path, ("triton-decode", "triton-prefill", "triton-cache-write"), *IDS)
    wrong = [(r.case, r.kernel, r.reason) for r in results if r.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED)]
    assert wrong == []
    passed = {r.case for r in results if r.verdict is Verdict.PASS}
    assert passed == {case for case in IDS if "-mha-" not in case}


@pytest.mark.parametrize("layout", ["far31", "far32"])
@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        ("decode", "decode-absorbed-h16-q1.kv300+q1.kv65-p64-bf16-mixed-s7"),
        ("write", "append-write-h1-q100.kv300-p64-bf16-rows-s7"),
    ],
)
def test_a_kernel_whose_offsets_wrap_fails_on_far_slots_and_nowhere_else(
    kernel: str, case: str, layout: str, tmp_path: Path
) -> None:
    far = case.replace("-s7", f"-{layout}-s7")
    plain, cut = results_of(tmp_path, (f"{CUTS}:{kernel}",), case, far)
    assert plain.verdict is Verdict.PASS
    assert cut.verdict in (Verdict.FAIL, Verdict.ERROR), cut.reason


def test_a_decode_that_splits_by_its_longest_request_is_seen_to_depend_on_the_batch(tmp_path: Path) -> None:
    """launch_decode: as many splits as the longest request wants, for all."""
    case = "decode-absorbed-h16-q1.kv500+q1.kv100-p64-bf16-normal-s7"
    (result,) = results_of(tmp_path, ("triton-decode",), case)
    assert (result.verdict, result.observed) == (Verdict.PASS, {"repeats": True, "batch_invariant": False})
