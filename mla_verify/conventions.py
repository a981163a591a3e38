"""A kernel's conventions -> ours: LSE base and layout, and what it gives a query that sees no key."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mla_verify.kernels.contract import LOW_LSE, Contract
from mla_verify.tensors import AttentionInputs, CopyInputs, MLAInputs, MLAOutput


def visible_keys(inputs: AttentionInputs) -> Tensor:
    """How many keys each query sees, [T] int64."""
    q_lens = inputs.qo_indptr.diff().long()
    kv_lens = inputs.kv_lens.long()
    per_token = kv_lens.repeat_interleave(q_lens)
    if not inputs.causal:
        return per_token
    first = inputs.qo_indptr[:-1].long().repeat_interleave(q_lens)
    position = torch.arange(len(per_token), device=inputs.device) - first
    return (per_token - q_lens.repeat_interleave(q_lens) + position + 1).clamp_min(0)


def wrong_empty_rows(actual: MLAOutput, contract: Contract, inputs: MLAInputs) -> str | None:
    """What is wrong with the LSE of queries without keys that a contract says is +inf, as it was returned, or None."""
    if isinstance(inputs, CopyInputs) or actual.lse is None or contract.empty_lse != "+inf":
        return None
    lse = (actual.lse.T if contract.lse_layout == "HT" else actual.lse)[visible_keys(inputs) == 0]
    wrong = lse[lse != math.inf]
    if not len(wrong):
        return None
    return f"lse of a query that sees no key: actual {float(wrong[0])}, expected inf, as the contract says"


def to_natural(actual: MLAOutput, contract: Contract, inputs: MLAInputs) -> MLAOutput:
    """The result as MLAOutput documents it. Its shapes have been checked; an LSE in base 2 becomes float64."""
    if isinstance(inputs, CopyInputs):
        return actual
    out, lse = actual.out, actual.lse
    empty = visible_keys(inputs) == 0
    if contract.empty_out == "any" and bool(empty.any()):
        out = out.clone()
        out[empty] = 0.0
    if lse is not None:
        lse = lse.T if contract.lse_layout == "HT" else lse
        lse = lse.double() * math.log(2) if contract.lse_base == "2" else lse
        if bool(empty.any()):
            lse = lse.clone()
            # Where +inf is declared, -inf is wrong, and stays so.
            lse[empty] = -lse[empty] if contract.empty_lse == "+inf" else lse[empty]
            if contract.empty_lse == "any":
                lse[empty] = -math.inf
            elif contract.empty_lse == "low":
                # All else, NaN too, stays as it is, and is not the -inf that is expected.
                lse[empty[:, None] & (lse <= LOW_LSE)] = -math.inf
    return replace(actual, out=out, lse=lse)
