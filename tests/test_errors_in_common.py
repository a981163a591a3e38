"""Errors that are not independent: of equal or alike keys, of equal rows, of what a sum loses in one direction.

Every honest run here was called wrong, or its fault accepted, by the error model as it was before.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_verify.cases import CaseSpec
from mla_verify.compare import compare_output
from mla_verify.emulate import EmulatedKernel
from mla_verify.expected import Expected, expect
from mla_verify.formats import FORMATS
from mla_verify.inputs import make_inputs
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.tensors import AttentionInputs, MHAInputs, MLAOutput


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mha(q: Tensor, ks: list[Tensor], vs: list[Tensor], dtype: str, scale: float = 1.0, queries: int = 1) -> MHAInputs:
    """q [T, H, D], of each request `queries`; k [n, H, D] and v [n, H, V] of each. scale: that of unit scores."""
    lens = [len(k) for k in ks]
    to = FORMATS[dtype].torch_dtype

    def indptr(counts: list[int]) -> Tensor:
        return torch.tensor([0, *counts]).cumsum(0).int()

    return MHAInputs(
        qo_indptr=indptr([queries] * len(ks)),
        kv_lens=torch.tensor(lens).int(),
        sm_scale=scale / math.sqrt(q.shape[-1]),
        causal=False,
        q=q.to(to),
        k=torch.cat(ks).to(to),
        v=torch.cat(vs).to(to),
        kv_indptr=indptr(lens),
        qk_rope_head_dim=0,
    )


def failed(output: MLAOutput, expected: Expected, facts: RoundingFacts, inputs: AttentionInputs) -> set[str]:
    comparisons = compare_output(output, expected, facts, inputs)
    return {f"{c.tensor} {check.name}" for c in comparisons for check in c.checks if not check.passed}


def assert_told_apart(
    inputs: AttentionInputs, output: MLAOutput, facts: RoundingFacts, scale: float = 1.005, lse: float = 0.0
) -> None:
    """The honest output is accepted. So wrong a scale is not, and neither is an LSE that is so far off."""
    expected = expect(inputs, [facts])
    assert not failed(output, expected, facts, inputs)
    out = (expected.attention.out * scale).to(output.out.dtype)
    assert failed(MLAOutput(out, None), expected, facts, inputs)
    if lse:
        assert output.lse is not None
        assert failed(MLAOutput(output.out, output.lse + lse), expected, facts, inputs) == {"lse max_z"}


# What fp32 sums lose


def in_one_chain(inputs: MHAInputs) -> MLAOutput:
    """Attention whose P.V and denominator are each one chain of fp32 additions, over requests of one length."""
    requests = len(inputs.kv_lens)
    k, v = (x.unflatten(0, (requests, -1)) for x in (inputs.k, inputs.v))
    score = torch.einsum("thd,tnhd->nth", inputs.q, k) * torch.tensor(inputs.sm_scale)
    top = score.amax(0)
    p = torch.exp(score - top)
    total, acc = torch.zeros_like(top), torch.zeros(*top.shape, v.shape[-1])
    for j in range(len(p)):
        total = total + p[j]
        acc = acc + p[j, ..., None] * v[:, j]
    return MLAOutput(acc / total[..., None], top + total.log())


def needles(rows: int, lead: float, mean: float) -> MHAInputs:
    """Rows of one heavy key, in an early place, and 2,000 of weight e^-lead."""
    g = gen(2)
    q = torch.randn(rows, 2, 16, generator=g)
    k = 0.1 * torch.randn(rows, 2000, 2, 16, generator=g)
    k[:, 5] = q * lead / q.square().sum(-1, keepdim=True) * 4
    v = torch.randn(rows, 2000, 2, 64, generator=g) + mean
    return mha(q, list(k), list(v), "fp32")


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize(("lead", "mean"), [(16.0, 0.0), (17.0, 0.0), (17.0, 1.0)])
def test_light_keys_that_the_denominator_loses_are_no_fault(rows: int, lead: float, mean: float) -> None:
    # Values without a mean: P.V loses nothing worth mention and the denominator all. max_z was 98, slope 113.
    inputs = needles(rows, lead, mean)
    assert_told_apart(inputs, in_one_chain(inputs), RoundingFacts("fp32"), scale=1.002, lse=0.002)


def test_an_lse_off_by_a_hundredth_is_rejected_at_131072_keys_in_one_chain() -> None:
    # An addition loses u of the sum at most. With all that light keys weigh taken for lost, 0.012 and 0.028 passed.
    g = gen(3)
    q, k, v = torch.randn(1, 2, 16, generator=g), torch.randn(131072, 2, 16, generator=g), torch.ones(131072, 2, 1)
    inputs, facts = mha(q, [k], [v], "fp32", scale=2.0), RoundingFacts("fp32")
    expected = expect(inputs, [facts])
    lse = expected.attention.lse.float()
    assert not failed(MLAOutput(torch.ones(1, 2, 1), lse), expected, facts, inputs)
    assert failed(MLAOutput(torch.ones(1, 2, 1), lse + 0.01), expected, facts, inputs) == {"lse max_z"}


# Rows


def padded(keys: int) -> MHAInputs:
    """Sixty times one request of so many keys, as padding is, and eight others of 300."""
    g = gen(4)
    q = torch.randn(9, 4, 64, generator=g)
    ks, vs = ([torch.randn(n, 4, 64, generator=g) for n in [keys] + 8 * [300]] for _ in "kv")
    order = [0] * 60 + list(range(1, 9))
    return mha(q[order], [ks[i] for i in order], [vs[i] for i in order], "bf16")


@pytest.mark.parametrize(
    "case",
    [
        "prefill-mha-h16-q130.kv130+q33.kv33-ragged-bf16-normal-s0",
        "mixed-absorbed-h16-q1.kv33+q1.kv0+q5.kv100+q0.kv64+q3.kv2+q2.kv0+q1.kv500-p64-bf16-normal-s0",
        "1",
        "300",
    ],
)
def test_rows_of_few_keys_do_not_hide_a_wrong_scale_of_the_others(case: str) -> None:
    # One key's row is exact, and had 99.8 % of the pooled weight: a scale off by 0.19 % passed. And padding, which is
    # most of the rows, is one row.
    inputs = padded(int(case)) if case.isdigit() else make_inputs(CaseSpec.parse(case))
    kernel = EmulatedKernel(tile=32)
    facts, output = kernel.facts("bf16"), kernel.run(inputs)
    expected = expect(inputs, [facts])
    assert not failed(output, expected, facts, inputs)
    out = expected.attention.out.clone()
    out[expected.attention.num_keys > 1] *= 1.0013
    assert "out slope" in failed(MLAOutput(out.bfloat16(), None), expected, facts, inputs)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_batch_of_equal_requests_has_the_errors_of_one(dtype: str) -> None:
    # 64 times the same error, and in each the same few elements: slope was 13 to 16, rms_z 1.15 with a limit of 1.11.
    g = gen(0)
    q = torch.randn(1, 32, 64, generator=g).expand(64, -1, -1)
    k, v = torch.randn(64, 32, 64, generator=g), torch.randn(64, 32, 128, generator=g)
    inputs = mha(q, [k] * 64, [v] * 64, dtype)
    kernel = EmulatedKernel()
    assert_told_apart(inputs, kernel.run(inputs), kernel.facts(dtype))


# Roundings of P


def emulated(inputs: MHAInputs, dtype: str, rowsum: str, scale: float = 1.005, lse: float = 0.02) -> None:
    kernel = EmulatedKernel(rounds_p=dtype != "fp32", rowsum="rounded" if rowsum == "rounded" else "unrounded")
    assert_told_apart(inputs, kernel.run(inputs), kernel.facts(dtype), scale, lse)


@pytest.mark.parametrize("rowsum", ["unrounded", "rounded"])
@pytest.mark.parametrize("spread", [3e-4, 1e-3])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_scores_that_are_almost_equal_round_alike(spread: float, mean: float, rowsum: str) -> None:
    # All p lie in one or two cells of bf16: LSE z was 31 where rounded p are summed, slope 17 where not.
    g = gen(1)
    q, k = torch.randn(1, 4, 192, generator=g), torch.randn(2048, 4, 192, generator=g)
    v = torch.randn(2048, 4, 128, generator=g) + mean
    # A maximum is no further below the last than the lightest key, so that the error stays this small.
    emulated(mha(q, [k], [v], "bf16", spread), "bf16", rowsum, lse=30 * spread)


@pytest.mark.parametrize("requests", [1, 64])
@pytest.mark.parametrize("keys", [64, 300])
def test_scores_that_are_almost_equal_round_alike_in_many_rows(keys: int, requests: int) -> None:
    # No row's error stands out; 64 of one sign made a slope of 34.
    g = gen(0)
    q = torch.randn(64, 4, 64, generator=g)
    ks = [torch.randn(keys, 4, 64, generator=g) for _ in range(requests)]
    vs = [torch.randn(keys, 4, 64, generator=g) + 5 * torch.randn(1, 4, 64, generator=g) for _ in range(requests)]
    emulated(mha(q, ks, vs, "bf16", 3e-4, queries=64 // requests), "bf16", "unrounded")


def test_p_rounds_alike_under_a_maximum_that_is_not_the_last() -> None:
    # 1,000 p's of 1/8, which bf16 holds, but they were rounded while the maximum was lower, by 2^-0.3.
    p = torch.full((1152,), 1 / 8, dtype=torch.float64) * (1 + 3e-7 * torch.arange(-576, 576))
    p[0], p[-1] = 0.5**0.3, 1.0
    rest, parts = p.log(), []
    for _ in range(3):  # a score as the sum of three bf16 numbers
        parts.append(rest.bfloat16().double())
        rest = rest - parts[-1]
    k = torch.stack(parts, -1)[:, None].float()
    inputs = mha(torch.ones(1, 1, 3), [k], [torch.randn(1152, 1, 64, generator=gen(5))], "bf16", 3**0.5)
    emulated(inputs, "bf16", "rounded")


@pytest.mark.parametrize("rowsum", ["unrounded", "rounded"])
@pytest.mark.parametrize(("lead", "mean"), [(16.0, 0.0), (17.0, 0.0), (17.0, 1.0)])
def test_light_keys_that_fp16_cannot_hold_vanish_together(lead: float, mean: float, rowsum: str) -> None:
    # p under half of fp16's smallest number: max_z was 47, LSE z 29.
    g = gen(2)
    q, k = torch.randn(1, 4, 64, generator=g), 0.1 * torch.randn(4096, 4, 64, generator=g)
    k[5] = q[0] * lead / q[0].square().sum(-1, keepdim=True) * 8
    v = torch.randn(4096, 4, 64, generator=g) + mean
    emulated(mha(q, [k], [v], "fp16"), "fp16", rowsum)


@pytest.mark.parametrize("rowsum", ["unrounded", "rounded"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_light_keys_that_are_all_alike_round_alike(dtype: str, rowsum: str) -> None:
    # A sink, and padding of zeros after it: LSE z was 69, slope 33.
    g = gen(3)
    q, k = torch.randn(1, 4, 192, generator=g), torch.zeros(2048, 4, 192)
    k[0] = q[0] * 4 / q[0].square().sum(-1, keepdim=True) * math.sqrt(192)
    # Not equal to the last bit.
    k[1:, :, 0] = torch.arange(1, 2048)[:, None] * 1e-6
    v = torch.randn(2048, 4, 128, generator=g) + 0.5
    inputs = mha(q, [k], [v], dtype)
    emulated(inputs, dtype, rowsum)
    if rowsum == "rounded":  # then both sums err by one factor, and an element may not be off by two steps
        kernel = EmulatedKernel(rowsum="rounded")
        facts, out = kernel.facts(dtype), kernel.run(inputs).out
        at = out.float().abs().argmax()
        out.view(-1)[at] *= 1 + 4 * FORMATS[dtype].unit_roundoff
        assert failed(MLAOutput(out, None), expect(inputs, [facts]), facts, inputs) == {"out max_z"}


@pytest.mark.parametrize(
    ("dtype", "rowsum"),
    [("bf16", "unrounded"), ("bf16", "rounded"), ("fp16", "unrounded"), ("fp16", "rounded"), ("fp32", "unrounded")],
)
def test_equal_keys_have_one_error(dtype: str, rowsum: str) -> None:
    # 8 keys, 256 times each: max_z was 24, 28 and 13.
    g = gen(2)
    q, k, v = (torch.randn(n, 4, d, generator=g) for n, d in ((1, 192), (8, 192), (8, 128)))
    emulated(mha(q, [k.repeat(256, 1, 1)], [v.repeat(256, 1, 1)], dtype), dtype, rowsum)


@pytest.mark.parametrize("keys", [256, 1024])
def test_values_with_a_vector_in_common_err_as_one_number(keys: int) -> None:
    # fp32 out of rounded P: all dims have one error, and were taken for as many as keys: rms_z 2.5, limit 2.1.
    g = gen(keys)
    q, k = torch.randn(1, 32, 64, generator=g), torch.randn(keys, 32, 64, generator=g)
    v = 0.01 * torch.randn(keys, 32, 128, generator=g) + 3 * torch.randn(1, 32, 128, generator=g)
    inputs = mha(q, [k], [v], "bf16")
    out, lse = EmulatedKernel()._attend(*(t.float().transpose(0, 1) for t in (inputs.q, inputs.k, inputs.v)), inputs)
    output = MLAOutput(out.transpose(0, 1).contiguous(), lse.transpose(0, 1))
    assert_told_apart(inputs, output, RoundingFacts("fp32", p_dtype="bf16", tile=64), scale=1.002)
