"""The error model of form layer: what is rounded between the weights and the attention kernel.

absorbed   q_nope w_kc is stored in 16 bits: one error a token, head and latent dim, common to all keys; so is the
           latent output, before w_vc.
expanded   keys and values of every head are stored in 16 bits: one error a key, head and dim, common to all queries.
Beside both, the products with the weights are fp32 sums. docs/error-model.md derives what is charged.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mla_verify.constants import Constants
from mla_verify.formats import FORMATS, FloatFormat
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.key_noise import U32, chopped, round_to, splitting, ulp
from mla_verify.layer_expected import LayerRequest
from mla_verify.noise import Beside
from mla_verify.reference.attention import Attention, attend_absorbed
from mla_verify.reference.key_sums import key_copies

_BLOCK_BYTES = 64 << 20  # of one float64 buffer
_TINY = torch.finfo(torch.float64).tiny


def inner_facts(facts: RoundingFacts) -> RoundingFacts:
    """Of the attention over values ckv w_vc. Partial outputs in 16 bits are latent ones, and so charged here."""
    return replace(facts, partial_dtype="fp32") if facts.layer == "absorbed" else facts


def beside(r: LayerRequest, attention: Attention, facts: RoundingFacts, c: Constants) -> Beside | None:
    """What errs beside the attention of one request. None: nothing is stored on the way.

    attention: with the weighings of `inner_facts`.
    """
    if facts.layer is None:
        return None
    if not r.q_nope.numel() or not len(r.ckv):
        row = torch.zeros_like(attention.lse)
        return Beside(torch.zeros_like(attention.out), row, row, row, row, torch.full_like(row, math.inf))
    found = _absorbed(r, attention, facts, c) if facts.layer == "absorbed" else _expanded(r, attention, facts, c)
    empty = attention.num_keys == 0
    named = {name: x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0.0) for name, x in vars(found).items()}
    return Beside(**{**named, "num_sources": found.num_sources})


def _absorbed(r: LayerRequest, attention: Attention, facts: RoundingFacts, c: Constants) -> Beside:
    fmt = FORMATS[facts.out_dtype]
    asked = splitting(facts, c) if facts.partial_dtype != "fp32" else None
    latent = attend_absorbed(
        r.q_latent, r.q_pe, r.ckv, r.kpe, sm_scale=r.sm_scale, causal=r.causal, splittings=[asked] if asked else []
    )
    q_variance = of_query(r, facts, c)
    stored, shown = of_latent_output(latent.out, fmt, c)
    for split in latent.splits:
        stored, shown = stored + split.variance, shown + split.variance

    out, direction = attention.out, attention.direction
    p, values = weights_of(r, attention), r.keys_and_values[1]
    variance, along, sources = torch.zeros_like(out), torch.zeros_like(attention.lse), torch.zeros_like(attention.lse)
    latent_dim, v_dim = r.w_vc.shape[1:]
    step = max(1, _BLOCK_BYTES // (8 * latent_dim * max(len(r.ckv), 2 * v_dim)))
    for h in range(out.shape[1]):
        for first in range(0, len(out), step):
            t = slice(first, first + step)
            # d out / d q_latent = sm_scale sum_j p_j ckv_j (v_j - o)^T, [rows, R, V]: an error common to all keys
            # moves the output by how latent and values vary together.
            moved = ((p[t, h, None] * r.ckv.T).flatten(0, 1) @ values[:, h]).unflatten(0, (-1, latent_dim))
            moved -= latent.out[t, h, :, None] * out[t, h, None]
            by_query = r.sm_scale * q_variance[t, h].sqrt()[..., None] * moved
            by_output = stored[t, h].sqrt()[..., None] * r.w_vc[h]
            both = torch.cat([by_query, by_output], dim=1)  # [rows, 2 R, V]: independent errors, what each does
            # Ties of latent dims are taken as in noise_of, all dims together, since each counts a little.
            more = (shown[t, h] @ r.w_vc[h].square() - by_output.square().sum(1)).clamp_min(0.0)
            variance[t, h] = both.square().sum(1) + more
            d = direction[t, h]
            tied = shown[t, h] * (d @ r.w_vc[h].T).square() - (by_output @ d[..., None]).squeeze(-1).square()
            along[t, h] = (both @ d[..., None]).square().sum((1, 2)) + tied.sum(-1).clamp_min(0.0)
            sources[t, h] = _num_sources(both)
    reach2 = (direction * out).sum(-1).square()
    safe = reach2.masked_fill(reach2 == 0, 1.0)
    terms = torch.einsum("qhr,hrv->qhv", latent.out.square(), r.w_vc.square())
    summed = sum_variance(latent_dim, terms, out.square(), facts, c)
    fewer = in_common(r.q_nope.shape[-1], facts, c)
    bias = tilt(p, facts, c)
    for split in latent.splits:
        bias = bias + split.tilt
    return Beside(
        variance=variance + summed,
        slope=along / safe + (direction.square() * summed).sum(-1) / safe,
        common=in_common(latent_dim, facts, c) + fewer * _scaled(attention),
        bias=bias,
        lse=r.sm_scale**2 * (q_variance * latent.out.square()).sum(-1) + fewer * attention.mean_score.square(),
        num_sources=sources,
    )


def of_query(r: LayerRequest, facts: RoundingFacts, c: Constants) -> Tensor:
    """Variance of the absorbed query as it is stored, [q_len, num_heads, R]."""
    terms = torch.einsum("qhn,hnr->qhr", r.q_nope.square(), r.w_kc.square())
    summed = sum_variance(r.q_nope.shape[-1], terms, r.q_latent.square(), facts, c)
    return c.known * ulp(r.q_latent, FORMATS[facts.out_dtype]).square() + summed


def of_latent_output(out: Tensor, fmt: FloatFormat, c: Constants) -> tuple[Tensor, Tensor]:
    """Variance of the latent output as it is stored, and the square of how far off that is if nothing else errs."""
    return c.known * ulp(out, fmt).square(), (round_to(out, fmt) - out).square().nan_to_num(posinf=0.0)


def _expanded(r: LayerRequest, attention: Attention, facts: RoundingFacts, c: Constants) -> Beside:
    v, out = r.keys_and_values[1], attention.out
    k_variance, v_variance = of_keys_stored(r, facts, c), of_values_stored(r, facts, c)
    fewer = in_common(r.ckv.shape[1], facts, c)
    p = weights_of(r, attention)  # [T, H, S]
    # Equal latents are rounded alike: m of them have one error, m times as large.
    copies = key_copies([r.ckv[None]])
    square = p.square() if copies is None else p.square() * copies
    w = square * (r.sm_scale**2 * torch.einsum("qhn,thn->qht", r.q_nope.square(), k_variance))
    one = w.sum(-1)
    w_v = torch.einsum("qht,thv->qhv", w, v)
    of_keys = torch.einsum("qht,thv->qhv", w, v.square()) - 2 * out * w_v + out.square() * one[..., None]
    of_values = torch.einsum("qht,thv->qhv", square, v_variance)

    d = attention.direction
    reach = (d * out).sum(-1)
    safe = reach.square().masked_fill(reach == 0, 1.0)
    a = torch.einsum("qhv,thv->qht", d, v)
    along_keys = (w * (a - reach[..., None]).square()).sum(-1) / safe
    along_values = (d.square() * of_values).sum(-1) / safe
    of_keys = of_keys.clamp_min(0.0)
    variance = of_keys + of_values
    # As noise._num_sources: no more numbers than keys, fewer where their values have a vector in common. Values err on
    # their own in every dim.
    keys = one.square() / w.square().sum(-1).clamp_min(_TINY)
    single = (w_v - out * one[..., None]).square() / one.clamp_min(_TINY)[..., None]
    norm = variance.clamp_min(_TINY)
    together = (single / norm).sum(-1) / (of_keys / norm).sum(-1).clamp_min(_TINY)
    share = (of_keys / norm).mean(-1)
    # Other queries see the same rounded keys and values, and err alike as far as they weigh the same ones, and ask
    # the same of them.
    same_values = torch.einsum("qht,uht->hqu", p if copies is None else p * copies, p)
    same_keys = same_values * torch.einsum("qhn,uhn->hqu", r.q_nope, r.q_nope)
    alike = correlation(same_values), correlation(same_keys)
    rows_values, rows_keys = (x.square().sum(-1).T for x in alike)
    mean_values, mean_keys = (x.mean(-1).T.clamp_min(0.0) for x in alike)
    norms = share.square() * (1 / keys.clamp_min(_TINY) + together.square()) * rows_keys
    norms = norms + (1 - share).square() * (rows_values - 1).clamp_min(0.0) / out.shape[-1]
    return Beside(
        variance=variance,
        slope=along_keys * (1 - mean_keys) + along_values * (1 - mean_values),
        common=along_keys * mean_keys + along_values * mean_values + fewer * (1 + _scaled(attention)),
        bias=tilt(p, facts, c),
        lse=one + fewer * attention.mean_score.square(),
        num_sources=1 / norms.clamp_min(_TINY),
    )


def correlation(covariance: Tensor) -> Tensor:
    """Of [H, T, T]; 0 in rows without variance."""
    sigma = covariance.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt().clamp_min(_TINY**0.25)
    return covariance / (sigma[:, :, None] * sigma[:, None])


def of_keys_stored(r: LayerRequest, facts: RoundingFacts, c: Constants) -> Tensor:
    """Variance of k_nope as it is stored, [kv_len, num_heads, N]."""
    return _stored(r.keys_and_values[0][..., : r.q_nope.shape[-1]], r.ckv, r.w_kc, facts, c)


def of_values_stored(r: LayerRequest, facts: RoundingFacts, c: Constants) -> Tensor:
    """Variance of v as it is stored, [kv_len, num_heads, V]."""
    return _stored(r.keys_and_values[1], r.ckv, r.w_vc.transpose(1, 2), facts, c)


def _stored(x: Tensor, ckv: Tensor, w: Tensor, facts: RoundingFacts, c: Constants) -> Tensor:
    """Of x [S, H, D] = ckv w^T, summed in fp32 and stored. w: [H, D, R]."""
    terms = torch.einsum("tr,hdr->thd", ckv.square(), w.square())
    summed = sum_variance(ckv.shape[1], terms, x.square(), facts, c)
    return c.known * ulp(x, FORMATS[facts.out_dtype]).square() + summed


def sum_variance(count: int, squares: Tensor, whole: Tensor, facts: RoundingFacts, c: Constants) -> Tensor:
    """Variance of a product with the weights: an fp32 sum of `count` terms.

    squares: the sum of the terms' squares.  whole: the square of their sum.
    """
    random, drift = _cut_off(count, facts, c)
    chain = c.unknown * count * (c.random_walk * squares + c.drift * whole)
    return U32**2 * (chain + random * squares + drift * whole)


def in_common(count: int, facts: RoundingFacts, c: Constants) -> float:
    """Variance of the relative error that all products with the weights have in common: tensor cores cut off."""
    return U32**2 * _cut_off(count, facts, c)[1]


def _cut_off(count: int, facts: RoundingFacts, c: Constants) -> tuple[float, float]:
    random, drift = chopped(torch.tensor(float(count)), replace(facts, tensor_core_k=facts.layer_tensor_core_k), c)
    return float(random), float(drift)


def _scaled(attention: Attention) -> Tensor:
    """(change of the slope per relative change of all scores)^2. Scores cut off alike are those of another sm_scale."""
    reach = (attention.direction * attention.out).sum(-1)
    moved = attention.score_along - attention.mean_score * reach
    return (moved / reach.masked_fill(reach == 0, 1.0)).square()


def weights_of(r: LayerRequest, attention: Attention) -> Tensor:
    """The softmax weights, [q_len, num_heads, kv_len]."""
    k = r.keys_and_values[0]
    score = r.sm_scale * torch.einsum("qhd,thd->qht", torch.cat([r.q_nope, r.q_pe], dim=-1), k)
    hidden = torch.arange(len(k), device=k.device) >= attention.num_keys[:, None, None]
    return torch.exp(score.masked_fill(hidden, -math.inf) - attention.lse.nan_to_num(neginf=0.0)[..., None])


def _num_sources(errors: Tensor) -> Tensor:
    """How many independent numbers the dims' errors are, [rows]. errors: [rows, sources, V], what each source does."""
    unit = errors / errors.square().sum(1, keepdim=True).sqrt().clamp_min(_TINY)
    correlation = unit.transpose(1, 2) @ unit
    return errors.shape[2] ** 2 / correlation.square().sum((1, 2)).clamp_min(1.0)


def tilt(p: Tensor, facts: RoundingFacts, c: Constants) -> Tensor:
    """A key with nearly all the weight: what is stored of it, as value or in the latent output, takes back the rest."""
    largest = p.amax(-1, keepdim=True)
    rest = p.masked_fill(p >= largest, 0.0).sum(-1)
    split = splitting(replace(facts, max_splits=2, partial_dtype=facts.out_dtype), c)
    assert split is not None
    return split.tilt(rest)
