"""Seeded honest runs of form layer: an emulated kernel between the weights, or torch's own attention, both ways."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from mla_verify.cases import REGIMES, CaseSpec, Request
from mla_verify.compare import compare_output
from mla_verify.emulate import EmulatedKernel
from mla_verify.expected import Expected, expect
from mla_verify.formats import FORMATS
from mla_verify.inputs import make_inputs
from mla_verify.kernels.contract import Contract, Form, KernelBase, RoundingFacts, facts_on
from mla_verify.kernels.layers import AbsorbedLayer, ExpandedLayer
from mla_verify.results import Comparison
from mla_verify.tensors import AttentionInputs, LayerInputs, MLAOutput, output_buffers

WAYS = ("absorbed", "expanded")
_ROUNDED_P = (
    EmulatedKernel(rounds_p=False),
    EmulatedKernel(rounds_p=True),
    EmulatedKernel(rounds_p=True, rowsum="rounded"),
)
EMULATED = tuple(
    replace(rounded, splits=splits, tile=32, rounds_partials=rounds_partials)
    for splits, rounds_partials, rounded in itertools.product((1, 2, 8), (False, True), _ROUNDED_P)
    if not (splits == 1 and rounds_partials)
)


class Inner(KernelBase):
    """An emulated kernel as the one between the weights."""

    def __init__(self, way: str, emulated: EmulatedKernel = EMULATED[0]) -> None:
        self.name, self.emulated = "emulated", emulated
        form: Form = "absorbed" if way == "absorbed" else "mha"
        self.contract = Contract(form=form, facts=emulated.facts, returns_lse=True)

    def run(self, inputs: AttentionInputs, out: MLAOutput) -> MLAOutput:
        return self.emulated.run(inputs)


def layer(way: str, inner: KernelBase) -> AbsorbedLayer | ExpandedLayer:
    return AbsorbedLayer("absorbed", inner) if way == "absorbed" else ExpandedLayer("expanded", inner)


@dataclass(frozen=True)
class LayerRun:
    spec: CaseSpec
    way: str
    facts: RoundingFacts
    inputs: LayerInputs
    output: MLAOutput
    expected: Expected
    comparisons: tuple[Comparison, ...]

    def judged(self, output: MLAOutput, facts: RoundingFacts | None = None) -> set[str]:
        """The checks that fail for another output, or by other facts."""
        facts = facts or self.facts
        expected = self.expected if facts == self.facts else expect(self.inputs, [facts])
        return failed(compare_output(output, expected, facts, self.inputs))


def failed(comparisons: tuple[Comparison, ...]) -> set[str]:
    return {f"{c.tensor} {check.name}" for c in comparisons for check in c.checks if not check.passed}


def judge_again(run: LayerRun, facts: RoundingFacts) -> set[str]:
    """The checks that fail when the same output is judged anew, by these facts and the error model as it is now."""
    return failed(compare_output(run.output, expect(run.inputs, [facts]), facts, run.inputs))


def run_layer(
    case: str | CaseSpec,
    way: str,
    emulated: EmulatedKernel = EMULATED[0],
    change: Callable[[LayerInputs], LayerInputs] = lambda inputs: inputs,
) -> LayerRun:
    spec = CaseSpec.parse(case) if isinstance(case, str) else case
    made = make_inputs(spec)
    assert isinstance(made, LayerInputs)
    inputs = change(made)
    kernel = layer(way, Inner(way, emulated))
    facts = facts_on(kernel.contract, spec.dtype, "cpu")
    if emulated.tensor_cores:
        facts = replace(facts, tensor_core_k=16)  # they are emulated, and the products with the weights are not
    output = kernel.run(inputs, output_buffers(inputs, FORMATS[spec.dtype].torch_dtype).output)
    expected = expect(inputs, [facts])
    return LayerRun(spec, way, facts, inputs, output, expected, compare_output(output, expected, facts, inputs))


def honest_layer(number: int, dtype: str, max_keys: int = 1200) -> LayerRun:
    """Run `number` of a dtype: regimes and ways take turns, the rest is drawn from the number."""
    rng = random.Random(f"layer {dtype} {number}")
    q_len = rng.choice((1, 1, 2, 5, 17, 40))
    longest = min(max_keys, 1200 if q_len == 1 else 4000 // q_len)
    lens = [max(1, round(2 ** rng.uniform(0, (longest - 1).bit_length()))) for _ in range(2)]
    spec = CaseSpec(
        phase="mixed",
        form="layer",
        num_heads=rng.choice((2, 4, 8)),
        requests=tuple(Request(q_len, min(n, longest)) for n in lens),
        page_size=rng.choice((1, 16, 64)),
        dtype=dtype,
        regime=REGIMES[number % len(REGIMES)],
        seed=number,
        causal=rng.random() < 0.9,
    )
    return run_layer(spec, WAYS[number // len(REGIMES) % 2], rng.choice(EMULATED))
