"""Form layer: one float64 truth for kernels that absorb the weights and for those that expand the latent by them.

Both ways are attention with values of every head's own, ckv w_vc: with keys [ckv, kpe] for the query q_nope w_kc, or
with keys [ckv w_kc^T, kpe] for q_nope itself. The scores are the same; what a kernel's arithmetic does to them is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mla_verify.constants import Constants
from mla_verify.expected import DenseRequest, Expected, concatenate, noises_of, refuse
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.noise import Beside, Noise
from mla_verify.reference.attention import Attention, expand_kv
from mla_verify.reference.paged import gather_by_page_table
from mla_verify.tensors import LayerInputs


@dataclass(frozen=True)
class LayerRequest:
    """One request of a layer, dense, float64."""

    q_nope: Tensor  # [q_len, num_heads, N]
    q_pe: Tensor  # [q_len, num_heads, P]
    w_kc: Tensor  # [num_heads, N, R]
    w_vc: Tensor  # [num_heads, R, V]
    ckv: Tensor  # [kv_len, R]
    kpe: Tensor  # [kv_len, P]
    sm_scale: float
    causal: bool

    @cached_property
    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """k [kv_len, num_heads, N + P] and v [kv_len, num_heads, V]."""
        return expand_kv(self.ckv, self.kpe, self.w_kc, self.w_vc)

    @cached_property
    def q_latent(self) -> Tensor:
        """The absorbed query, [q_len, num_heads, R]."""
        return torch.einsum("qhn,hnr->qhr", self.q_nope, self.w_kc)

    @property
    def expanded(self) -> DenseRequest:
        q = torch.cat([self.q_nope, self.q_pe], dim=-1)
        dims = self.q_nope.shape[-1], self.q_pe.shape[-1]
        return DenseRequest((q,), self.keys_and_values, dims, self.sm_scale, self.causal)

    @property
    def absorbed(self) -> DenseRequest:
        """The same attention by the scores of the latent. Heads share the keys, which take no memory of their own."""
        q = torch.cat([self.q_latent, self.q_pe], dim=-1)
        k = torch.cat([self.ckv, self.kpe], dim=-1)[:, None].expand(-1, q.shape[1], -1)
        dims = self.ckv.shape[-1], self.kpe.shape[-1]
        return DenseRequest((q,), (k, self.keys_and_values[1]), dims, self.sm_scale, self.causal)


def read_request(inputs: LayerInputs, request: int) -> LayerRequest:
    """Reads referenced slots only. Raises UsageError for NaN or infinity there."""
    start, end = inputs.q_range(request)
    ckv, kpe = (
        gather_by_page_table(cache, inputs.page_table, inputs.kv_lens, request)
        for cache in (inputs.ckv_cache, inputs.kpe_cache)
    )
    q_nope, q_pe = inputs.q_nope[start:end], inputs.q_pe[start:end]
    named = {"q_nope": q_nope, "q_pe": q_pe, "w_kc": inputs.w_kc, "w_vc": inputs.w_vc}
    refuse(named | {"ckv_cache": ckv, "kpe_cache": kpe}, inputs.sm_scale, request)
    wide = {name: tensor.double() for name, tensor in named.items()}
    return LayerRequest(**wide, ckv=ckv.double(), kpe=kpe.double(), sm_scale=inputs.sm_scale, causal=inputs.causal)


def expect_layer(inputs: LayerInputs, facts: Sequence[RoundingFacts], constants: Constants) -> Expected:
    """The layer's attention, and the noise of each of `facts`, which are distinct.

    A kernel's attention errs as noise_of says, carried through w_vc by taking the values of every head. What is stored
    between inputs, kernel and output is beside that (layer_noise.py).
    """
    from mla_verify.layer_noise import beside, inner_facts

    requests = [read_request(inputs, b) for b in range(inputs.num_requests)]
    noise: dict[RoundingFacts, Noise] = {}
    whole: Attention | None = None
    for way in dict.fromkeys(f.layer for f in facts) or [None]:
        mine = [f for f in facts if f.layer == way]
        inner = [inner_facts(f) for f in mine]
        dense = [r.absorbed if way == "absorbed" else r.expanded for r in requests]
        parts = [d.attend(inner, constants) for d in dense]
        besides = [_joined([beside(r, p, f, constants) for r, p in zip(requests, parts, strict=True)]) for f in mine]
        whole = concatenate(parts)
        noise |= zip(mine, noises_of(whole, inner, constants, dense[0].qk_dims, besides), strict=True)
    assert whole is not None
    return Expected(replace(whole, sums=(), splits=(), chunks=()), noise)


def _joined(parts: Sequence[Beside | None]) -> Beside | None:
    found = [vars(part) for part in parts if part is not None]
    return Beside(**{name: torch.cat([part[name] for part in found]) for name in found[0]}) if found else None
