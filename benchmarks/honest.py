"""Seeded honest runs: run number i of a dtype is a function of i, of the case and of a kernel that makes no mistake.

Used by benchmarks/error_model.py (2,000 a dtype) and by the tests (a sample). Real dims, every regime, both forms, 1 to
16,000 keys; the emulated kernel in every combination of its roundings, and torch's own attention.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from mla_verify.cases import REGIMES, CaseSpec, Request
from mla_verify.compare import compare_output
from mla_verify.emulate import EmulatedKernel
from mla_verify.expected import Expected, expect
from mla_verify.formats import FORMATS
from mla_verify.inputs import make_inputs
from mla_verify.kernels import load_kernel
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.results import Comparison
from mla_verify.tensors import MLAInputs, MLAOutput, output_buffers

EMULATED = tuple(
    EmulatedKernel(
        splits=splits, tile=tile, rounds_p=rounds_p, rowsum=rowsum, rounds_partials=rounds_partials, base2=base2
    )
    for splits, tile, rounds_p, rowsum, rounds_partials, base2 in itertools.product(
        (1, 2, 8), (32, 64), (False, True), ("unrounded", "rounded"), (False, True), (False, True)
    )
    # What has nothing to round is the same kernel once more.
    if not (splits == 1 and rounds_partials) and not (not rounds_p and rowsum == "rounded")
)


@dataclass(frozen=True)
class HonestRun:
    spec: CaseSpec
    kernel: str
    facts: RoundingFacts
    inputs: MLAInputs
    output: MLAOutput
    expected: Expected
    comparisons: tuple[Comparison, ...]


def spec_of(number: int, dtype: str, max_keys: int = 16000) -> CaseSpec:
    """The case of run `number`: regimes take turns, the rest is drawn from the number."""
    rng = random.Random(f"{dtype} {number}")
    form = rng.choice(("absorbed", "absorbed", "mha"))
    # Keys of every head's own cost 16 times the memory, and are no different at 16,000.
    longest = max_keys if form == "absorbed" else min(max_keys, 2000)
    q_len = rng.choice((1, 1, 1, 2, 4, 17))
    lens = [round(2 ** rng.uniform(0, (longest - 1).bit_length())) for _ in range(rng.randint(2, 3))]
    lens = sorted(min(n, longest) for n in lens)
    # Long rows cost most of the time: one long request at most, beside the shortest.
    lens = [lens[0], lens[-1]] if lens[-1] > 4000 else lens
    return CaseSpec(
        phase="mixed",
        form=form,
        num_heads=rng.choice((8, 12, 16) if max(lens) < 8000 else (8,)),
        requests=tuple(Request(q_len, n) for n in lens),
        page_size=rng.choice((1, 16, 64)) if form == "absorbed" else 0,
        dtype=dtype,
        regime=REGIMES[number % len(REGIMES)],
        seed=number,
    )


def honest_run(number: int, dtype: str, max_keys: int = 16000) -> HonestRun:
    """Run `number`: one in eight is torch's own attention, the others an emulated kernel."""
    spec = spec_of(number, dtype, max_keys)
    rng = random.Random(f"kernel {dtype} {number}")
    inputs = make_inputs(spec)
    if rng.randrange(8) == 0:
        kernel = load_kernel(f"torch-{spec.form}")
        name, facts = kernel.name, kernel.contract.facts(dtype)
        output = kernel.run(inputs, output_buffers(inputs, FORMATS[dtype].torch_dtype).output)
    else:
        emulated = rng.choice(EMULATED)
        name, facts, output = str(emulated), emulated.facts(dtype), emulated.run(inputs)
    expected = expect(inputs, [facts])
    return HonestRun(spec, name, facts, inputs, output, expected, compare_output(output, expected, facts, inputs))
