"""Kernels and results that no tensor was needed for. The kernels are registered by tests as "tests.fakes:Class"."""

from __future__ import annotations

from typing import Any

import pytest

from mla_verify.cases import CaseSpec
from mla_verify.kernels.contract import Contract, KernelBase, RoundingFacts
from mla_verify.results import CaseResult, Check, Comparison, Location, Verdict
from mla_verify.tensors import MLAInputs, MLAOutput

DECODE = "decode-absorbed-h16-q1.kv64-p64-fp32-normal-s7"
PREFILL = "prefill-absorbed-h16-q9.kv9-p64-bf16-normal-s7"
MHA = "prefill-mha-h16-q9.kv9-ragged-fp32-normal-s7"


class Absorbed(KernelBase):
    """Claims decode and prefill in fp32 and bf16, and runs nothing."""

    name = "absorbed"
    contract = Contract("absorbed", ("fp32", "bf16"), ("decode", "prefill"), facts=RoundingFacts)

    def own_process(self, device: str) -> None:
        return None  # another process knows nothing of what `register` did

    def version(self) -> str:
        return "fake 1.0"

    def run(self, inputs: MLAInputs, out: MLAOutput) -> MLAOutput:
        raise AssertionError("a test that runs no kernel ran one")

    def ran(self) -> str:
        return "nothing"


class Other(Absorbed):
    name = "other"


class MHAKernel(Absorbed):
    name = "mha"
    contract = Contract("mha", ("fp32",), ("prefill",), facts=RoundingFacts)


class Gone(Absorbed):
    name = "gone"

    def why_unavailable(self, device: str) -> str | None:
        return f"gonelib is not installed on {device}"

    def version(self) -> str:
        raise ModuleNotFoundError("gonelib")


class Broken(Absorbed):
    name = "broken"

    def why_unavailable(self, device: str) -> str | None:
        raise OSError("libbroken.so: undefined symbol")


def register(monkeypatch: pytest.MonkeyPatch, *kernels: type[Absorbed]) -> None:
    """Make these the only kernels there are."""
    table = {kernel.name: f"tests.fakes:{kernel.__name__}" for kernel in kernels}
    monkeypatch.setattr("mla_verify.kernels.KERNELS", table)


def comparison(
    *, tensor: str = "out", value: float = 0.5, limit: float = 6.0, z: float = 0.5, actual: float = 1.25
) -> Comparison:
    worst = Location(request=2, token=3, head=5, dim=77, actual=actual, expected=1.5, z=z)
    checks = (Check("max_z", value, limit, "over all elements"), Check("rms_z", 0.7, 1.2, ""))
    return Comparison(tensor, checks, max_abs_error=0.25, max_rel_error=0.125, rms_z=0.7, worst=worst)


def result(verdict: Verdict = Verdict.PASS, case: str = DECODE, kernel: str = "absorbed", **fields: Any) -> CaseResult:
    spec = CaseSpec.parse(case)
    known: dict[str, Any] = {
        "reason": "" if verdict is Verdict.PASS else f"a reason for {verdict.value}",
        "claim": "the claim",
        "repeat": f"mla-verify kernels --kernel {kernel} --case {case} --device cpu",
        "phase": spec.phase,
        "dtype": spec.dtype,
        "seconds": {"kernel": 0.25, "reference": 0.5},
    }
    return CaseResult(case, kernel, verdict, **known | fields)
