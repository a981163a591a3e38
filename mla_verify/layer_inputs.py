"""Inputs of the layer form: queries before absorption, a paged latent cache, and the weights that lie between the two.

Weights are normal of variance 1 / kv_lora_rank, so that a latent of unit size gives keys and values of unit size, as
kv_b_proj does behind its norm. Regimes then mean what they mean in the mha form: scores of 128 + 64 dims.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mla_verify.cases import CaseSpec, Request
from mla_verify.formats import FORMATS
from mla_verify.inputs import paged, visible
from mla_verify.regimes import REGIME_TABLE, DenseRequest
from mla_verify.tensors import LayerInputs

# Regimes whose edit of the keys is one of the latent, since no key can be changed alone. The others change queries
# only, by the keys that come out of the weights: needles are aimed through them.
_OF_LATENT = ("mixed", "unequal", "channel")


def make_layer_inputs(spec: CaseSpec, generator: torch.Generator, poison: float) -> LayerInputs:
    """The inputs of a case of form layer, all in its dtype; slots that no request references hold `poison`."""
    d, dtype = spec.dims, FORMATS[spec.dtype].torch_dtype
    size = d.kv_lora_rank**-0.5
    w_kc = size * torch.randn(spec.num_heads, d.qk_nope_head_dim, d.kv_lora_rank, generator=generator)
    w_vc = size * torch.randn(spec.num_heads, d.kv_lora_rank, d.v_head_dim, generator=generator)
    dense = [_request(spec, request, w_kc, generator) for request in spec.requests]
    cached = paged(spec, dense, generator, poison)
    return LayerInputs(
        qo_indptr=cached.qo_indptr,
        kv_lens=cached.kv_lens,
        sm_scale=spec.sm_scale,
        causal=spec.causal,
        q_nope=cached.q_nope,
        q_pe=cached.q_pe,
        w_kc=w_kc.to(dtype),
        w_vc=w_vc.to(dtype),
        ckv_cache=cached.ckv_cache,
        kpe_cache=cached.kpe_cache,
        page_table=cached.page_table,
    )


def _request(spec: CaseSpec, request: Request, w_kc: Tensor, generator: torch.Generator) -> DenseRequest:
    """q_nope [q_len, num_heads, 128] with the latent [kv_len, 1, 512] as k_nope, edited as the regime asks for."""
    d, heads = spec.dims, spec.num_heads
    latent = DenseRequest(
        q_nope=torch.randn(request.q_len, heads, d.qk_nope_head_dim, generator=generator),
        q_pe=torch.randn(request.q_len, heads, d.qk_rope_head_dim, generator=generator),
        k_nope=torch.randn(request.kv_len, 1, d.kv_lora_rank, generator=generator),
        kpe=torch.randn(request.kv_len, d.qk_rope_head_dim, generator=generator),
        v=None,
        num_keys=visible(spec, request),
        page_size=spec.page_size,
        sm_scale=spec.sm_scale,
        generator=generator,
    )
    if spec.regime == "mixed":
        REGIME_TABLE["mixed"].edit(latent)
    elif spec.regime == "unequal":
        _unequal(latent, w_kc)
    elif spec.regime == "channel":
        _channel(latent)
    if spec.regime in _OF_LATENT:
        return latent
    keys = replace(latent, k_nope=torch.einsum("tr,hnr->thn", latent.k_nope[:, 0], w_kc))
    REGIME_TABLE[spec.regime].edit(keys)
    return replace(keys, k_nope=latent.k_nope)


def _unequal(r: DenseRequest, w_kc: Tensor) -> None:
    """As in the other forms: the last quarter of the keys gets about e^4 times the weight, and other values."""
    direction = r.randn(r.k_nope.shape[2])
    direction /= direction.norm()
    r.k_nope[len(r.k_nope) * 3 // 4 :] += 8.0 * direction
    toward = w_kc @ direction  # [num_heads, N]: what that adds to a key, by 8
    r.q_nope *= 0.3
    r.q_nope += (4.0 / 8.0 / r.sm_scale) * toward / toward.square().sum(-1, keepdim=True)


def _channel(r: DenseRequest) -> None:
    """One channel of the latent a hundred times the others: all keys and values of a head have a vector in common."""
    channel = int(torch.randint(r.k_nope.shape[2], (1,), generator=r.generator))
    r.k_nope[..., channel] += 100.0
