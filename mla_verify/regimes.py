"""Input regimes: what queries and keys look like, so that a fault has something to show on.

Random normal inputs alone make a flat softmax in which scale, RoPE, merge and mask faults hide. Each regime below is a
plain function that edits one request's dense float32 tensors, and names the faults that it is there to show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DenseRequest:
    """One request before rounding, float32. Hk is 1 (absorbed: heads share keys) or num_heads (mha)."""

    q_nope: Tensor  # [q_len, num_heads, N]
    q_pe: Tensor  # [q_len, num_heads, P]
    k_nope: Tensor  # [kv_len, Hk, N]; absorbed: the latent, which is the value too
    kpe: Tensor  # [kv_len, P]
    v: Tensor | None  # [kv_len, Hk, V]; None in the absorbed form
    num_keys: Tensor  # [q_len] int64: keys each query sees
    page_size: int  # 0 for mha
    sm_scale: float
    generator: torch.Generator

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    @property
    def num_heads(self) -> int:
        return self.q_nope.shape[1]


def _uniform(r: DenseRequest) -> None:
    r.q_nope.zero_()
    r.q_pe.zero_()


def _normal(r: DenseRequest) -> None:
    """Scores of standard deviation sm_scale * sqrt(576) = 2.4 (absorbed) or sm_scale * sqrt(192) = 1.4 (mha)."""


def _aim(r: DenseRequest, targets: Tensor, score: float) -> None:
    """Add to each query what lifts its key targets[q_len, num_heads] to about `score`; where that is -1, nothing."""
    head = torch.arange(r.num_heads) if r.k_nope.shape[1] > 1 else torch.zeros(r.num_heads, dtype=torch.long)
    key = r.k_nope[targets, head] * (targets >= 0)[..., None]  # [q_len, num_heads, N]
    r.q_nope += key * (score / r.sm_scale / key.square().sum(-1, keepdim=True).clamp_min(1e-6))


def _peaked(r: DenseRequest) -> None:
    # 60 above a background of standard deviation 60 / sqrt(N) <= 5.4: the winner leads by more than 30.
    r.q_nope *= 0.1
    r.q_pe *= 0.1
    if len(r.k_nope):
        last = (r.num_keys - 1).clamp_min(0)
        targets = (torch.rand(len(last), r.num_heads, generator=r.generator) * (last + 1)[:, None]).long()
        _aim(r, targets, 60.0)


def edge_keys(num_keys: int, page_size: int) -> list[int]:
    """The keys next to an edge of a tile, page or split among `num_keys`, the last key first."""
    edges = {0, num_keys}
    for step in (32, 64, 128, page_size or 64):
        edges |= {step, num_keys // step * step}
    for splits in (2, 3, 4, 8):
        edges |= {-(-num_keys // splits), num_keys // splits // 64 * 64}
    keys = {key for edge in edges for key in (edge - 1, edge) if 0 <= key < num_keys}
    return sorted(keys, key=lambda key: (key != num_keys - 1, key))


def _needle(r: DenseRequest) -> None:
    """Each head of a query looks at one edge key, which gets most of the mass but not all; the first at the last key.

    Where a query has more edge keys than heads, some heads look at two or more, and each gets its share.
    """
    r.q_nope *= 0.1
    r.q_pe *= 0.1
    if not len(r.k_nope):
        return
    rows = [_needles(t, n, r.num_heads, r.page_size) for t, n in enumerate(r.num_keys.tolist())]
    for i in range(max((len(keys) for row in rows for keys in row), default=0)):
        targets = torch.tensor([[keys[i] if i < len(keys) else -1 for keys in row] for row in rows])
        _aim(r, targets, math.log(max(len(r.k_nope), 2)) + 2.0)


def _needles(token: int, num_keys: int, num_heads: int, page_size: int) -> list[list[int]]:
    """The keys that each head of one query looks at. Tokens start at different edges."""
    edges = edge_keys(num_keys, page_size) or [0]
    keys = [[edges[0 if h == 0 else (token * num_heads + h) % len(edges)]] for h in range(num_heads)]
    left = [edge for edge in edges if [edge] not in keys]
    for h in range(1, num_heads):
        keys[h] += left[h - 1 :: num_heads - 1]
    return keys


def _mixed(r: DenseRequest) -> None:
    """A temperature from 1/8 to 8 for every head, a gain for every 64 keys, a strong RoPE part, values off centre."""
    temperature = torch.logspace(-3, 3, r.num_heads, base=2.0)[:, None] if r.num_heads > 1 else torch.ones(1, 1)
    gain = torch.exp(0.5 * r.randn(len(r.k_nope) // 64 + 1, 1, 1)).repeat_interleave(64, 0)[: len(r.k_nope)]
    r.q_nope *= temperature
    r.q_pe *= 2.0 * temperature
    r.kpe *= 2.0
    r.k_nope *= gain
    r.k_nope += 0.5 * r.randn(*r.k_nope.shape[1:])
    if r.v is not None:
        r.v.mul_(gain).add_(0.5 * r.randn(*r.v.shape[1:]))


def _unequal(r: DenseRequest) -> None:
    """The last quarter of the keys gets about e^4 times the weight: parts of equal mass would hide a wrong merge."""
    direction = r.randn(*r.k_nope.shape[1:])
    direction /= direction.norm(dim=-1, keepdim=True)  # [Hk, N]
    quarter = slice(len(r.k_nope) * 3 // 4, None)
    r.k_nope[quarter] += 8.0 * direction
    r.q_nope *= 0.3
    r.q_nope += (4.0 / 8.0 / r.sm_scale) * direction
    if r.v is not None:
        r.v[quarter] += 1.0


def _rope(r: DenseRequest) -> None:
    r.q_nope *= 0.1
    r.q_pe *= 3.0
    r.kpe *= 2.0


def _nope(r: DenseRequest) -> None:
    r.q_nope *= 1.5
    r.q_pe *= 0.1


def _channel(r: DenseRequest) -> None:
    """One channel a hundred times the others, as activations of real models have."""
    channel = int(torch.randint(r.k_nope.shape[2], (1,), generator=r.generator))
    r.k_nope[..., channel] += 100.0
    r.q_nope[..., channel] *= 0.3
    if r.v is not None:
        r.v[..., channel % r.v.shape[2]] += 100.0


@dataclass(frozen=True)
class Regime:
    edit: Callable[[DenseRequest], None]
    summary: str
    # Faults (vacuity.py) each of which must move some output of a case beyond its limit.
    shows: tuple[str, ...]


REGIME_TABLE = {
    "uniform": Regime(_uniform, "q = 0: every key weighs the same", ("zeros", "last_key")),
    "normal": Regime(_normal, "independent normal numbers", ("zeros", "sm_scale", "no_rope", "no_nope")),
    "peaked": Regime(_peaked, "one key wins by more than 30", ("zeros", "no_nope")),
    "mixed": Regime(_mixed, "temperature by head, gain by tile, values off centre", ("zeros", "sm_scale", "no_rope")),
    "needle": Regime(_needle, "each head looks at one key at an edge", ("zeros", "last_key", "sm_scale")),
    "unequal": Regime(_unequal, "parts of the keys of very unequal mass", ("zeros", "sm_scale", "no_nope")),
    "rope": Regime(_rope, "scores from the RoPE part", ("zeros", "sm_scale", "no_rope")),
    "nope": Regime(_nope, "scores from the latent part", ("zeros", "sm_scale", "no_nope")),
    "channel": Regime(_channel, "one channel a hundred times the others", ("zeros", "sm_scale", "no_nope")),
}
