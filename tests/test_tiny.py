"""The smallest run from end to end. Read this first: case -> inputs -> kernel -> reference -> noise -> comparison."""

from __future__ import annotations

import torch

from mla_verify.cases import CaseSpec
from mla_verify.compare import compare_output
from mla_verify.expected import expect
from mla_verify.inputs import make_inputs
from mla_verify.kernels import load_kernel
from mla_verify.tensors import MLAOutput, output_buffers
from tests.cli_helper import invoke

CASE = "decode-absorbed-h8-q1.kv100-p64-bf16-normal-s0"


def test_a_right_kernel_passes_and_the_same_output_times_1005_promille_does_not() -> None:
    inputs = make_inputs(CaseSpec.parse(CASE))
    kernel = load_kernel("torch-absorbed")
    output = kernel.run(inputs, output_buffers(inputs, torch.bfloat16).output)
    assert output.out.shape == (1, 8, 512)

    facts = kernel.contract.facts("bf16")
    expected = expect(inputs, [facts])
    assert expected.attention.out.dtype == torch.float64
    assert all(comparison.passed for comparison in compare_output(output, expected, facts, inputs))

    scaled = MLAOutput((output.out.double() * 1.005).bfloat16(), output.lse)
    assert not all(comparison.passed for comparison in compare_output(scaled, expected, facts, inputs))


def test_the_command_says_pass_and_exits_0() -> None:
    result = invoke("kernels", "--kernel", "torch-absorbed", "--case", CASE, "--device", "cpu")
    assert result.exit_code == 0
    assert "PASS: 1 of 1 planned cases decided, 0 wrong" in result.stdout
