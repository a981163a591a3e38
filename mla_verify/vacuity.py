"""Vacuity: can this case tell? Each fault that its regime is there to show must move some output beyond its limit.

The faults are computed, not guessed: float64 attention on faulty inputs for a few rows of the case, held against the
noise of the very kernel that is judged. A case that cannot tell is refused, since passing it would mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mla_verify.constants import CONSTANTS
from mla_verify.expected import DenseRequest, Expected, dense_request
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.noise import z_limit
from mla_verify.tensors import AttentionInputs

# fault -> (how far it moves the output [rows, heads, v_dim], tokens of the rows, heads)
FaultSizes = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

_MAX_HEADS = 4
_MAX_REQUESTS = 2
# What a kernel that ignores sm_scale would most likely use: the scale of 128 + 64 dims.
_DEFAULT_SCALE = 192**-0.5


@dataclass(frozen=True)
class Fault:
    what: str  # "a kernel that ..." would pass
    min_keys: int  # a row with fewer cannot show it
    apply: Callable[[DenseRequest], DenseRequest | None]  # None: the output is all zero


def _without_part(rope: bool) -> Callable[[DenseRequest], DenseRequest]:
    def apply(r: DenseRequest) -> DenseRequest:
        if len(r.q) == 2:
            return replace(r, q=tuple(torch.zeros_like(q) if (i == 1) == rope else q for i, q in enumerate(r.q)))
        q = r.q[0].clone()
        q[..., slice(r.qk_dims[0], None) if rope else slice(0, r.qk_dims[0])] = 0
        return replace(r, q=(q,))

    return apply


FAULTS = {
    "zeros": Fault("returns zeros", 1, lambda r: None),
    "last_key": Fault("loses the last key", 1, lambda r: replace(r, k=tuple(k[:-1] for k in r.k))),
    "sm_scale": Fault("ignores sm_scale", 2, lambda r: replace(r, sm_scale=_DEFAULT_SCALE)),
    "no_rope": Fault("drops the RoPE part of the scores", 2, _without_part(rope=True)),
    "no_nope": Fault("drops the latent part of the scores", 2, _without_part(rope=False)),
}


def fault_sizes(inputs: AttentionInputs, expected: Expected, faults: tuple[str, ...]) -> FaultSizes:
    """For each fault that some sampled row can show, how far it moves those rows' output.

    Computed once for a case; `unseen_faults` holds it against each kernel's noise.
    """
    lens = inputs.kv_lens.tolist()
    live = [b for b in range(inputs.num_requests) if lens[b] and inputs.q_range(b)[0] < inputs.q_range(b)[1]]
    # The longest requests: where a fault is hardest to see, and the last token of each, which sees every key.
    live = sorted(live, key=lambda b: -lens[b])[:_MAX_REQUESTS]
    num_heads = inputs.queries.shape[1]
    heads = torch.tensor(sorted({h * (num_heads - 1) // max(1, _MAX_HEADS - 1) for h in range(_MAX_HEADS)}))
    sizes: FaultSizes = {}
    rows = []
    for b in live:
        r = dense_request(inputs, b)
        k = r.k if len(r.q) == 2 else tuple(k[:, heads] for k in r.k)
        rows.append(
            (inputs.q_range(b)[1] - 1, lens[b], replace(r, q=tuple(q[-1:, heads] for q in r.q), k=k, causal=False))
        )
    for name in faults:
        fault = FAULTS[name]
        moved = []
        for token, kv_len, row in rows:
            if kv_len >= fault.min_keys:
                faulty = fault.apply(row)
                out = faulty.attend().out[0] if faulty else 0.0
                moved.append((out - expected.attention.out[token, heads]).abs())
        if moved:
            tokens = torch.tensor([t for t, n, _ in rows if n >= fault.min_keys])
            sizes[name] = (torch.stack(moved), tokens, heads)
    return sizes


def unseen_faults(sizes: FaultSizes, expected: Expected, facts: RoundingFacts) -> list[str]:
    """The faults, as "a kernel that ...", that no sampled output would show beyond the limit of max_z."""
    noise = expected.noise[facts]
    limit = z_limit(noise.out.numel(), CONSTANTS.false_alarm / CONSTANTS.statistics)
    unseen = []
    for name, (moved, tokens, heads) in sizes.items():
        sigma = noise.out[tokens[:, None], heads].sqrt()
        if float((moved / sigma).max()) <= limit:
            unseen.append(FAULTS[name].what)
    return unseen
