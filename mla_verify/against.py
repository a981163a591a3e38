"""`--against DIR`: this run's outputs held against those that a run with another build has dumped (dump.py)."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mla_verify.dump import Dump
from mla_verify.results import CaseResult, Comparison

if TYPE_CHECKING:
    from mla_verify.kernels.contract import RoundingFacts
    from mla_verify.outputs import Obtained

_PREFIX = "against "  # compare_builds.PREFIX, which needs torch


def is_against(comparison: Comparison) -> bool:
    """Whether it is one with another build's output, and not with the reference."""
    return comparison.tensor.startswith(_PREFIX)


def build_sentence(comparison: Comparison) -> str:
    """What a failed comparison of two builds says."""
    check = next(check for check in comparison.checks if not check.passed)
    tensor = comparison.tensor.removeprefix(_PREFIX)
    if check.name in ("bits", "shape"):
        return f"{tensor} is not the other build's bit for bit: {check.detail}"
    where = f"; worst at {comparison.worst} (expected: the other build's)" if comparison.worst else ""
    if check.name == "nonfinite":
        return f"{tensor} has NaN or infinity where the other build has not, or the reverse: {check.detail}{where}"
    return (
        f"{tensor} differs from the other build's by more than the roundings of both: "
        f"{check.name} {check.value:.4g} is over {check.limit:.3g}{where}"
    )


@dataclass
class Against:
    dump: Dump
    kernels: Mapping[str, str]  # here -> there
    bit_equal: bool
    # (case, kernel here) -> why its output could not be compared.
    why_not: dict[tuple[str, str], str] = field(default_factory=dict)
    lse_missing: int = 0  # pairs of which only one build returned an LSE

    @classmethod
    def of(cls, dump: Dump, kernels: Sequence[str], bit_equal: bool) -> Against:
        """kernels: those of this run. One here and one there are held together whatever they are called."""
        names = {name: name for name in kernels if name in dump.kernels}
        if len(kernels) == len(dump.kernels) == 1:
            names = {kernels[0]: dump.kernels[0]}
        return cls(dump, names, bit_equal)

    def facts_there(self, case: str, kernel: str) -> RoundingFacts | None:
        """The roundings that the other build declared for this pair."""
        pair = self.dump.pairs.get((case, self.kernels.get(kernel, "")))
        return pair.facts if pair else None

    def compare(self, obtained: Obtained, inputs: str) -> tuple[Comparison, ...]:
        """Both outputs of one pair, or nothing, and `why_not` says why. inputs: the digest of this run's."""
        case, kernel = obtained.entry.case_id, obtained.entry.kernel.name
        try:
            found = self._compare(obtained, case, kernel, inputs)
        except Exception as error:  # out of memory, say: the verdict on the kernel stands without this
            found = f"comparing raised {type(error).__name__}: {' '.join(str(error).splitlines()[:1])[:200]}"
        if isinstance(found, str):
            self.why_not[case, kernel] = found
            return ()
        return found

    def _compare(self, obtained: Obtained, case: str, kernel: str, inputs: str) -> tuple[Comparison, ...] | str:
        from mla_verify.compare_builds import BothNoises, compare_builds

        there = self.kernels.get(kernel)
        if there is None:
            return f"the dump has no kernel {kernel}; it has {', '.join(self.dump.kernels) or 'none'}"
        pair = self.dump.pairs.get((case, there))
        if pair is None:
            return "the dump does not have the case"
        if pair.facts is None:
            return f"the dump has no output of it, its verdict there is {pair.verdict.value}"
        if pair.inputs != inputs:
            return "its inputs were others when the dump was made"
        noises = None
        if obtained.expected is not None:
            noise = obtained.expected.noise
            noises = BothNoises(noise[obtained.facts], noise[pair.facts])
        output = self.dump.load(pair, obtained.output.out.device.type)
        if (output.lse is None) != (obtained.output.lse is None):
            self.lse_missing += 1
        return compare_builds(obtained.output, output, obtained.inputs, noises, self.bit_equal)

    @property
    def arguments(self) -> str:
        """The arguments that ask for this comparison, quoted for a shell."""
        return shlex.join(["--against", str(self.dump.folder), *(["--bit-equal"] if self.bit_equal else [])])

    def open_questions(self, results: Sequence[CaseResult]) -> list[str]:
        """One sentence for each reason why pairs that one of the builds has were not compared."""
        reasons: Counter[tuple[str, str]] = Counter()
        for result in results:
            if any(map(is_against, result.comparisons)):
                continue
            pair = self.dump.pairs.get((result.case, self.kernels.get(result.kernel, "")))
            why = self.why_not.get((result.case, result.kernel))
            if why is None and pair is not None and pair.file is not None:
                why = f"there is no output of it here, its verdict is {result.verdict.value}"
            if why is not None:
                reasons[result.kernel, why] += 1
        found = [f"{kernel}: {_pairs(n)} not compared with the dump: {why}." for (kernel, why), n in reasons.items()]
        if not found and not any(is_against(c) for result in results for c in result.comparisons):
            found = ["Nothing was compared with the dump: no output is in both."]
        return found

    def described(self) -> dict[str, Any]:
        """What a report says of the other build, in plain values."""
        there = self.dump.environment
        return {
            "folder": str(self.dump.folder),
            "kernels": dict(self.kernels),
            "bit_equal": self.bit_equal,
            "lse_missing": self.lse_missing,
            **{name: there.get(name) for name in ("commit", "package_hash", "device", "gpu", "versions", "started")},
        }


def _pairs(count: int) -> str:
    return "1 case is" if count == 1 else f"{count} cases are"
