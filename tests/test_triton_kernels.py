"""Our Triton kernels in Triton's interpreter: right by the product's own comparison, and by what that does not ask."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_verify.cases import CaseSpec
from mla_verify.compare import compare_output
from mla_verify.expected import expect
from mla_verify.inputs import make_inputs
from mla_verify.kernels import load_kernel
from mla_verify.tensors import MLAOutput, WriteInputs
from tests.triton_interpreted import (
    APPEND,
    ATTENTION,
    GUARD_ROWS,
    NO_KEYS,
    OUTSIDE_EVERY,
    SPLIT_CASE,
    SPLITS,
    WRITTEN,
    Write,
    write_of,
)

ROOT = Path(__file__).parents[1]
BITS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the kernels returned. One process for all tests: it imports torch and triton."""
    file = tmp_path_factory.mktemp("triton") / "results.pt"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.triton_interpreted", str(file)],
        # The products are small: BLAS threads would wait for each other, tens of milliseconds on a busy machine.
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = torch.load(file)
    return results


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in ATTENTION.items() for case in cases])
def test_attention_is_accepted_with_the_roundings_that_the_kernel_declares(
    interpreted: dict[str, Any], name: str, case: str
) -> None:
    spec, contract = CaseSpec.parse(case), load_kernel(name).contract
    assert spec.phase in contract.phases
    facts = contract.facts(spec.dtype)
    inputs = make_inputs(spec)
    actual = interpreted["attention"][name, case]
    comparisons = compare_output(MLAOutput(actual["out"], actual["lse"]), expect(inputs, [facts]), facts, inputs)
    assert [c.tensor for c in comparisons] == ["out", "lse"]
    assert not [(c.tensor, check) for c in comparisons for check in c.checks if not check.passed]
    assert actual["overwritten"] is None


def test_ran_says_how_many_splits_there_were_and_that_the_interpreter_ran_them(interpreted: dict[str, Any]) -> None:
    ran = {key: result["ran"] for key, result in interpreted["attention"].items()}
    assert ran["triton-decode", ATTENTION["triton-decode"][0]] == "decode, 8 splits, interpreted"
    assert ran["triton-decode", "decode-absorbed-h8-q1.kv257-p1-fp16-unequal-s0"] == "decode, 5 splits, interpreted"
    assert {text for (name, _), text in ran.items() if name == "triton-prefill"} == {"prefill, interpreted"}
    assert all(text.startswith("cache write, decode") for (name, _), text in ran.items() if "write" in name)
    assert interpreted["no_keys"]["triton-decode"]["ran"] == "decode, 1 split, interpreted"
    assert load_kernel("triton-decode").version() == f"triton {interpreted['triton']}"


def test_declared_splits_are_those_that_the_launcher_makes_at_most(interpreted: dict[str, Any]) -> None:
    for name, most in (("triton-decode", interpreted["max_splits"]), ("triton-prefill", 1)):
        assert load_kernel(name).contract.facts("bf16").max_splits == most


def test_a_decode_in_one_split_and_in_eight_is_the_same_but_for_rounding(interpreted: dict[str, Any]) -> None:
    # Of the second request's keys, in tiles of 32, eight splits leave five empty, and all of the third's.
    inputs = make_inputs(CaseSpec.parse(SPLIT_CASE))
    exact = expect(inputs, []).attention
    for num_splits in SPLITS:
        out, lse = interpreted["splits"][num_splits]
        assert float((out - exact.out).abs().max()) < 3e-6 * float(exact.out.abs().max())
        assert torch.allclose(lse.double(), exact.lse, rtol=3e-7, atol=3e-7)
    # Other splits are other roundings: the number that was asked for is the number that ran.
    assert len({interpreted["splits"][n][0].numpy().tobytes() for n in SPLITS}) == len(SPLITS)


@pytest.mark.parametrize("name", ATTENTION)
def test_a_query_without_keys_gets_out_0_and_lse_minus_infinity(interpreted: dict[str, Any], name: str) -> None:
    result = interpreted["no_keys"][name]
    assert result["out"].shape == (4, 8, 512), NO_KEYS
    assert not result["out"].any()
    assert bool((result["lse"] == -math.inf).all())


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(BITS[rows.element_size()])


def written(write: Write, tokens: torch.Tensor) -> torch.Tensor:
    """The bits of the pool once `tokens` are in their slots, and nothing else has changed."""
    pool = bits(write.pool).clone()
    pool[GUARD_ROWS + write.slots[tokens]] = bits(torch.cat([write.ckv, write.kpe], dim=-1))[tokens]
    return pool


@pytest.mark.parametrize(("count", "dtype"), WRITTEN)
def test_cache_write_is_the_concatenation_bit_for_bit_and_touches_no_other_row(
    interpreted: dict[str, Any], count: int, dtype: str
) -> None:
    write = write_of(count, dtype)
    expected = written(write, torch.arange(count))
    assert torch.equal(bits(interpreted["written"][count, dtype]), expected)
    assert torch.equal(bits(write.pool), expected) is (count == 0)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_cache_write_leaves_out_slots_before_the_cache_and_past_its_end(
    interpreted: dict[str, Any], dtype: str
) -> None:
    write = write_of(100, dtype, outside=True)
    inside = torch.arange(100) % OUTSIDE_EVERY != 0
    assert bool(((write.slots >= 0) & (write.slots < write.num_slots) == inside).all())
    assert torch.equal(bits(interpreted["outside"][dtype]), written(write, inside.nonzero()[:, 0]))


@pytest.mark.parametrize("case", APPEND)
def test_cache_write_puts_the_new_tokens_of_a_case_into_its_pages(interpreted: dict[str, Any], case: str) -> None:
    inputs = make_inputs(CaseSpec.parse(case))
    assert isinstance(inputs, WriteInputs)
    cache = bits(inputs.kv_cache.flatten(0, 1)).clone()
    inside = (inputs.slots >= 0) & (inputs.slots < len(cache))
    assert bool(inside.all()) is ("outside" not in case)
    cache[inputs.slots[inside]] = bits(torch.cat([inputs.ckv, inputs.kpe], dim=-1))[inside]
    actual = interpreted["append"][case]
    assert torch.equal(bits(actual["out"].flatten(0, 1)), cache)
    assert (actual["ran"], actual["overwritten"]) == ("cache write, interpreted", None)


@pytest.mark.parametrize("dims", ["96.64.128.128", "512.48.128.128", "8.64.128.128", "512.8.128.128"])
def test_dims_that_are_no_block_of_triton_are_refused(dims: str) -> None:
    case = CaseSpec.parse(f"decode-absorbed-h16-q1.kv64-p64-fp32-normal-dims{dims}-s0")
    for device in ("cpu", "cuda"):
        why = load_kernel("triton-decode").why_not(case, device)
        assert why and re.match(r"(kv_lora_rank|qk_rope_head_dim) is \d+, and a Triton block is", why)


def test_on_a_gpu_cases_of_any_size_are_taken_and_in_the_interpreter_small_ones() -> None:
    case = CaseSpec.parse("decode-absorbed-h128-q1.kv16384-p64-bf16-normal-s0")
    kernel = load_kernel("triton-decode")
    assert kernel.why_not(case, "cuda") is None
    assert "interpreter" in str(kernel.why_not(case, "cpu"))
