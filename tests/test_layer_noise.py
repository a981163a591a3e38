"""The error model of form layer: honest runs err as much as it says, and each of its terms is there for one of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import mla_verify.layer_noise as layer_noise
from mla_verify.cases import REGIMES
from mla_verify.constants import CONSTANTS
from mla_verify.emulate import EmulatedKernel, tensor_core_dot
from mla_verify.expected import expect
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.layer_expected import read_request
from mla_verify.tensors import LayerInputs
from tests.honest_layers import WAYS, LayerRun, failed, honest_layer, judge_again, run_layer

# One part, P in fp32: next to nothing errs in the kernel itself.
EXACT = EmulatedKernel(tile=32, rounds_p=False)
PREFIX = "prefix-layer-h8-q17.kv64-p16-bf16-{}-s0"
run = cache(run_layer)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_honest_runs_of_both_ways_are_accepted_and_err_as_much_as_predicted(dtype: str) -> None:
    # A sample; 360 a dtype, of up to 1,200 keys, gave no alarm and rms z from 0.43 (peaked) to 0.89.
    squares = defaultdict(list)
    for number in range(2 * len(REGIMES)):
        honest = honest_layer(number, dtype, max_keys=150)
        assert not failed(honest.comparisons), f"{honest.spec.id} {honest.way}"
        squares[honest.way].append(honest.comparisons[0].rms_z ** 2)
    for way in WAYS:
        assert len(squares[way]) == len(REGIMES)
        assert 0.5 < math.sqrt(sum(squares[way]) / len(REGIMES)) < 1.1


def zero(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: 0 * function(*args)


of_latent_output = layer_noise.of_latent_output
# Term -> (an honest run, what stands in its place to leave the term out, a check that then fails).
TERMS: dict[str, tuple[Callable[[], LayerRun], Callable[..., object], str]] = {
    "of_query": (lambda: run(PREFIX.format("nope"), "absorbed", EXACT), zero(layer_noise.of_query), "out rms_z"),
    "of_latent_output": (
        lambda: run(PREFIX.format("normal"), "absorbed", EXACT),
        lambda *args: tuple(0 * x for x in of_latent_output(*args)),
        "out rms_z",
    ),
    "of_keys_stored": (
        lambda: run(PREFIX.format("nope"), "expanded", EXACT),
        zero(layer_noise.of_keys_stored),
        "out rms_z",
    ),
    "of_values_stored": (
        lambda: run(PREFIX.format("needle"), "expanded", EXACT),
        zero(layer_noise.of_values_stored),
        "out rms_z",
    ),
    # 64 queries of a head look at few keys, whose rounding they share.
    "correlation": (
        lambda: run("prefix-layer-h4-q64.kv256-p16-fp16-needle-full-s6", "expanded", EXACT),
        lambda x: torch.eye(x.shape[1], dtype=torch.float64).expand_as(x),
        "out slope",
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_without_any_one_term_an_honest_run_is_called_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, instead, check = TERMS[name]
    honest = make()
    assert not failed(honest.comparisons)
    monkeypatch.setattr(layer_noise, name, instead)
    assert check in judge_again(honest, honest.facts)


def test_rows_that_share_rounded_keys_have_fewer_independent_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = run("prefix-layer-h4-q64.kv256-p16-fp16-needle-full-s6", "expanded", EXACT)
    assert not failed(honest.comparisons)
    monkeypatch.setattr(layer_noise, *("correlation", TERMS["correlation"][1]))
    assert "out rms_z" in judge_again(honest, honest.facts)


def level(inputs: LayerInputs) -> LayerInputs:
    """Large queries to which two keys are alike: the error of a query is all that moves weight between the two."""
    apart = read_request(inputs, 0).keys_and_values[0][..., :128].diff(dim=0)[0]  # [H, N]
    query = torch.randn(apart.shape, generator=torch.Generator().manual_seed(0)).double()
    query -= (query * apart).sum(-1, keepdim=True) / apart.square().sum(-1, keepdim=True) * apart
    return replace(inputs, q_nope=(12 * query[None]).to(inputs.q_nope.dtype))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_between_two_keys_all_dims_have_one_error(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = run_layer(f"decode-layer-h16-q1.kv2-p16-{dtype}-normal-s0", "absorbed", EXACT, level)
    assert not failed(honest.comparisons)
    monkeypatch.setattr(layer_noise, "_num_sources", lambda errors: torch.full((len(errors),), 128.0))
    assert judge_again(honest, honest.facts) == {"out rms_z"}


def test_what_shifts_all_scores_alike_is_no_error_of_the_output() -> None:
    # All keys have one large channel in common: charged in full, its rounding in the query would excuse anything.
    honest = run("prefix-layer-h4-q9.kv64-p16-bf16-channel-s0", "absorbed", EXACT)
    assert 0.7 < honest.comparisons[0].rms_z < 1.1


@pytest.mark.parametrize("way", WAYS)
def test_the_lse_errs_by_what_is_stored_before_the_kernel(way: str) -> None:
    honest = run(PREFIX.format("nope"), way, EXACT)
    lse = honest.comparisons[1]
    assert lse.tensor == "lse" and 0.5 < lse.rms_z < 1.2
    assert {"lse max_z", "out max_z"} <= judge_again(honest, replace(honest.facts, layer=None))


def test_partial_outputs_in_16_bits_are_latent_ones_and_reach_the_output_through_the_weights() -> None:
    split = EmulatedKernel(splits=8, tile=32, rounds_p=False, rounds_partials=True)
    honest = run("prefix-layer-h4-q17.kv256-p16-bf16-uniform-s0", "absorbed", split)
    assert not failed(honest.comparisons)
    assert judge_again(honest, replace(honest.facts, partial_dtype="fp32")) == {"out rms_z"}


def change_next_key(inputs: LayerInputs) -> LayerInputs:
    """Latents of two keys are neighbours in every dim: their mean is on a tie of the format throughout."""
    cache, page = inputs.ckv_cache.clone(), int(inputs.page_table[0, 0])
    first = cache[page, 0].abs()
    cache[page, 0], cache[page, 1] = first, (first.view(torch.int16) + 1).view(first.dtype)
    return replace(inputs, ckv_cache=cache)


def test_a_latent_output_on_ties_of_its_format_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = run_layer("decode-layer-h8-q1.kv2-p16-bf16-uniform-s0", "absorbed", EXACT, change_next_key)
    assert not failed(honest.comparisons)
    monkeypatch.setattr(layer_noise, "of_latent_output", lambda *args: (of_latent_output(*args)[0], 0 * args[0]))
    assert judge_again(honest, honest.facts) == {"out rms_z"}


def heavy(share: float) -> Callable[[LayerInputs], LayerInputs]:
    """Key 0 has all the weight but this share, for every query."""

    def change(inputs: LayerInputs) -> LayerInputs:
        kpe, q_pe = torch.zeros_like(inputs.kpe_cache), torch.zeros_like(inputs.q_pe)
        kpe[int(inputs.page_table[0, 0]), 0, 0] = 1
        q_pe[..., 0] = math.log((int(inputs.kv_lens[0]) - 1) * (1 - share) / share) / inputs.sm_scale
        return replace(inputs, q_nope=inputs.q_nope * 1e-3, q_pe=q_pe, kpe_cache=kpe)

    return change


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "u"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
@pytest.mark.parametrize("share", [0.3, 0.5])
def test_what_is_stored_of_one_heavy_key_takes_all_dims_along(
    way: str, dtype: str, u: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = run_layer(f"prefix-layer-h8-q16.kv32-p64-{dtype}-normal-full-s0", way, EXACT, heavy(share * u))
    assert not failed(honest.comparisons)
    monkeypatch.setattr(layer_noise, "tilt", lambda p, facts, c: 0 * p.sum(-1))
    assert judge_again(honest, honest.facts) == {"out slope"}


@pytest.mark.parametrize(("count", "one_sign"), [(128, False), (512, False), (512, True)])
def test_products_with_the_weights_on_tensor_cores_are_cut_off_by_what_is_charged(count: int, one_sign: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    a, w = (torch.randn(40, count, generator=generator).half().float() for _ in range(2))
    a, w = (a.abs(), w.abs()) if one_sign else (a, w)
    exact, squares = a.double() @ w.double().T, a.double().square() @ w.double().T.square()
    facts = RoundingFacts("fp16", layer="absorbed", layer_tensor_core_k=16)
    error = tensor_core_dot(a, w.T).double() - exact
    z = error / layer_noise.sum_variance(count, squares, exact.square(), facts, CONSTANTS).sqrt()
    # Charged as if all products were cut in full, which is the case for large ones first.
    assert 0.15 < float(z.square().mean().sqrt()) < 1
    common = math.sqrt(layer_noise.in_common(count, facts, CONSTANTS))
    if one_sign:
        assert 0.3 < -float((error / exact).mean()) / common < 1
    rounded = replace(facts, layer_tensor_core_k=None)
    assert layer_noise.in_common(count, rounded, CONSTANTS) == 0
    exact_sums = (a @ w.T).double() - exact
    z = exact_sums / layer_noise.sum_variance(count, squares, exact.square(), rounded, CONSTANTS).sqrt()
    assert 0.02 < float(z.square().mean().sqrt()) < 1  # a CPU adds in blocks, and errs less than one chain


def test_many_queries_do_not_hold_a_layer_to_finer_products_than_tensor_cores_give() -> None:
    honest = run("prefix-layer-h8-q17.kv64-p16-fp16-normal-s0", "expanded", EXACT)
    gpu = replace(honest.facts, layer_tensor_core_k=16)
    noise = expect(honest.inputs, [honest.facts, gpu]).noise
    assert bool((noise[gpu].slope_common > noise[honest.facts].slope_common).all())
    assert float((noise[gpu].out / noise[honest.facts].out).max()) < 1.01
