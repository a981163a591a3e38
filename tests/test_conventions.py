"""What a kernel's conventions mean: which queries see no key, and how its LSE becomes a natural one, [T, H]."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_verify.cases import CaseSpec
from mla_verify.conventions import to_natural, visible_keys
from mla_verify.inputs import indptr, make_inputs
from mla_verify.kernels import Contract
from mla_verify.tensors import AbsorbedInputs, MLAOutput

INF, NAN = math.inf, math.nan
LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=5)
RETURNS = Contract(returns_lse=True)


def inputs_of(lengths: list[tuple[int, int]], causal: bool = True, num_heads: int = 2) -> AbsorbedInputs:
    """Inputs with these (q_len, kv_len), whose numbers nobody reads."""
    tokens = sum(q_len for q_len, _ in lengths)
    return AbsorbedInputs(
        qo_indptr=indptr([q_len for q_len, _ in lengths]),
        kv_lens=torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32),
        sm_scale=1.0,
        causal=causal,
        q_nope=torch.zeros(tokens, num_heads, 3),
        q_pe=torch.zeros(tokens, num_heads, 2),
        ckv_cache=torch.zeros(1, 4, 3),
        kpe_cache=torch.zeros(1, 4, 2),
        page_table=torch.zeros(len(lengths), 2, dtype=torch.int32),
    )


# Tokens 0 and 1 of the second request stand before its only key, the third request has none.
EDGES = [(1, 3), (3, 1), (2, 0), (0, 4)]
EMPTY = torch.tensor([False, True, True, False, True, True])


def natural(contract: Contract, out: torch.Tensor, lse: torch.Tensor | None) -> MLAOutput:
    return to_natural(MLAOutput(out, lse), contract, inputs_of(EDGES))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """out [6, 2, 3] and lse [6, 2] of EDGES, as documented: 0 and -inf where there is no key."""
    out, lse = torch.randn(6, 2, 3), torch.randn(6, 2)
    out[EMPTY], lse[EMPTY] = 0.0, -INF
    return out, lse


@given(LENGTHS, st.booleans())
def test_visible_keys_are_those_that_a_loop_over_all_pairs_counts(lengths: list[tuple[int, int]], causal: bool) -> None:
    counted = [
        sum(not causal or key <= kv_len - q_len + token for key in range(kv_len))
        for q_len, kv_len in lengths
        for token in range(q_len)
    ]
    seen = visible_keys(inputs_of(lengths, causal))
    assert seen.dtype is torch.int64
    assert seen.tolist() == counted


def test_visible_keys_of_a_batch_without_queries_are_none() -> None:
    assert visible_keys(inputs_of([(0, 3), (0, 0)])).shape == (0,)


def test_what_follows_every_convention_of_ours_is_left_as_it_is() -> None:
    out, lse = rows()
    done = natural(RETURNS, out, lse)
    assert torch.equal(done.out, out)
    assert done.lse is not None and torch.equal(done.lse, lse) and done.lse.dtype is torch.float32


@given(st.lists(st.floats(-100, 100, width=32), min_size=12, max_size=12))
def test_base_2_becomes_natural_without_another_rounding(values: list[float]) -> None:
    lse = torch.tensor(values).view(6, 2)
    done = natural(replace(RETURNS, lse_base="2", empty_lse="any"), rows()[0], lse)
    assert done.lse is not None and done.lse.dtype is torch.float64
    wanted = [value * math.log(2) for value in lse.flatten().tolist()]
    seen = ~EMPTY.repeat_interleave(2)
    assert torch.equal(done.lse.flatten()[seen], torch.tensor(wanted, dtype=torch.float64)[seen])


@pytest.mark.parametrize("base", ["e", "2"])
def test_heads_first_is_transposed_and_not_reshaped(base: str) -> None:
    out, lse = rows()
    theirs = (lse / math.log(2) if base == "2" else lse).T.contiguous()
    done = natural(replace(RETURNS, lse_layout="HT", lse_base=base), out, theirs)
    assert done.lse is not None
    torch.testing.assert_close(done.lse.float(), lse)


def test_empty_rows_are_those_of_the_tokens_also_when_heads_come_first() -> None:
    out, lse = rows()
    theirs = lse.masked_fill(lse.isneginf(), INF).T.contiguous()
    done = natural(replace(RETURNS, lse_layout="HT", empty_lse="+inf"), out, theirs)
    assert done.lse is not None and torch.equal(done.lse, lse)


@pytest.mark.parametrize(
    ("declared", "right", "wrong"),
    [
        ("-inf", -INF, (INF, NAN, 0.0)),
        ("+inf", INF, (-INF, NAN, 0.0)),
        ("low", -INF, (INF, NAN, 0.0, -999.0, 100.0)),
        ("low", -5e4, (INF,)),
        ("low", -1000.0, (-999.0,)),
    ],
)
def test_of_an_empty_row_only_the_declared_infinity_becomes_minus_infinity(
    declared: str, right: float, wrong: tuple[float, ...]
) -> None:
    out, lse = rows()
    contract = replace(RETURNS, empty_lse=declared)
    for value in (right, *wrong):
        done = natural(contract, out, lse.masked_fill(EMPTY[:, None], value))
        assert done.lse is not None
        assert torch.equal(done.lse[~EMPTY], lse[~EMPTY])
        assert bool(done.lse[EMPTY].isneginf().all()) is (value == right), value


@pytest.mark.parametrize("value", [INF, -INF, NAN, 1e30, 0.0])
def test_any_forgives_what_stands_in_empty_rows_and_nothing_else(value: float) -> None:
    out, lse = rows()
    contract = replace(RETURNS, empty_out="any", empty_lse="any")
    theirs = out.masked_fill(EMPTY[:, None, None], value), lse.masked_fill(EMPTY[:, None], value)
    done = natural(contract, *theirs)
    assert torch.equal(done.out, out)
    assert done.lse is not None and torch.equal(done.lse, lse)
    full = ~EMPTY
    done = natural(contract, out.masked_fill(full[:, None, None], value), lse.masked_fill(full[:, None], value))
    assert done.lse is not None
    assert torch.equal(done.out[full].nan_to_num(nan=7.0), torch.full_like(out[full], value).nan_to_num(nan=7.0))
    assert torch.equal(done.lse[full].nan_to_num(nan=7.0), torch.full_like(lse[full], value).nan_to_num(nan=7.0))


def test_the_kernels_own_tensors_are_not_written_to() -> None:
    out, lse = torch.full((6, 2, 3), 5.0), torch.full((6, 2), INF)
    for empty_lse in ("+inf", "any"):
        natural(replace(RETURNS, empty_out="any", empty_lse=empty_lse), out, lse)
    assert bool((out == 5.0).all()) and bool((lse == INF).all())


def test_without_an_lse_there_is_nothing_to_convert() -> None:
    out, _ = rows()
    done = natural(Contract(lse_base="2", lse_layout="HT", empty_lse="+inf"), out, None)
    assert done.lse is None and torch.equal(done.out, out)


def test_a_cache_write_has_no_conventions() -> None:
    inputs = make_inputs(CaseSpec.parse("append-write-h1-q3.kv5-p4-fp16-rows-s0"))
    output = MLAOutput(torch.zeros(5, 4, 576), None)
    assert to_natural(output, Contract(form="write", empty_out="any"), inputs) is output
