"""Each rounding fact of the GPU kernels is needed: without it an honest kernel has errors that nothing explains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_helper import invoke
from tests.gpu_helper import needs
from tests.gpu_kernels_without_facts import KERNELS

FILE = Path(__file__).with_name("gpu_kernels_without_facts.py")
# Equal values show how parts are rounded; unequal masses and spread scores, how P is; needles, what tensor cores cut.
CASES = (
    "prefix-absorbed-h16-q129.kv1000-p1-bf16-uniform-s1",
    "prefix-absorbed-h16-q129.kv1000-p1-bf16-unequal-s1",
    "prefill-absorbed-h16-q513.kv513-p64-fp16-mixed-s1",
    "decode-absorbed-h16-8xq1.kv1023+q1.kv0-p64-fp16-needle-s1",
    "prefix-mha-h16-q129.kv1000+q64.kv65-ragged-bf16-uniform-s1",
    "prefix-mha-h16-q129.kv1000+q64.kv65-ragged-bf16-unequal-s1",
    "prefix-mha-h16-q129.kv1000+q64.kv65-ragged-fp16-unequal-s1",
    "prefix-mha-h16-q129.kv1000+q64.kv65-ragged-bf16-mixed-s1",
)


@pytest.mark.gpu
def test_without_any_one_of_its_facts_an_honest_kernel_leaves_the_range(tmp_path: Path) -> None:
    needs("flashinfer-mla-fa3", "flashinfer-merge", "sgl-merge", "sglang-merge")
    report = tmp_path / "report.json"
    kernels = [f"--kernel={FILE}:{name}" for name in KERNELS]
    cases = [f"--case={case}" for case in CASES]
    done = invoke("kernels", *kernels, *cases, "--device", "cuda", "--json", str(report))
    assert done.exit_code == 1, done.stdout
    # By kernel, the largest rms z of a tensor: it is 0.5 to 0.9 where the facts explain what there is.
    rms: dict[str, float] = dict.fromkeys(KERNELS, 0.0)
    verdicts: dict[str, set[str]] = {name: set() for name in KERNELS}
    for result in json.loads(report.read_text())["results"]:
        name = result["kernel"].rpartition(":")[2]
        verdicts[name].add(result["verdict"])
        sizes = [float(comparison["rms_z"]) for comparison in result["comparisons"]]
        rms[name] = max([rms[name], *sizes])
    complete = {name for name, fact in KERNELS.items() if fact is None}
    assert {name for name in complete if verdicts[name] - {"UNSUPPORTED"} != {"PASS"}} == set()
    assert {name: rms[name] for name in complete if rms[name] > 1.1} == {}
    assert {name: rms[name] for name in KERNELS if name not in complete and rms[name] < 1.1} == {}
