"""Inputs -> what the reference says of them, for every request, with the noise of each kernel that runs on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mla_verify.constants import CONSTANTS, Constants
from mla_verify.errors import UsageError
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.key_noise import chunking, splitting, weighings
from mla_verify.noise import Beside, Noise, noise_of
from mla_verify.reference.attention import Attention, attend_absorbed, attend_mha
from mla_verify.reference.chunk_rounding import ChunkRounding
from mla_verify.reference.key_sums import KeySums, SplitRounding
from mla_verify.reference.paged import gather_by_page_table
from mla_verify.tensors import AbsorbedInputs, AttentionInputs, LayerInputs


@dataclass(frozen=True)
class DenseRequest:
    """One request as the reference takes it, in the inputs' dtype: queries and keys in parts, and values."""

    q: tuple[Tensor, ...]  # absorbed: q_nope, q_pe; mha: q.  [q_len, num_heads, ..]
    k: tuple[Tensor, ...]  # absorbed: ckv, kpe [kv_len, ..]; mha: k, v [kv_len, num_heads, ..]
    qk_dims: tuple[int, int]  # nope and rope part of the scores
    sm_scale: float
    causal: bool

    def attend(self, facts: Sequence[RoundingFacts] = (), constants: Constants = CONSTANTS) -> Attention:
        """The reference's attention, with the sums that the noise of each of `facts` needs, in their order."""
        splittings = [splitting(f, constants) for f in facts]
        chunkings = [chunking(f, constants) for f in facts]
        form = attend_absorbed if len(self.q) == 2 else attend_mha
        return form(
            *self.q,
            *self.k,
            sm_scale=self.sm_scale,
            causal=self.causal,
            weighings=[w for f in facts for w in weighings(f, self.qk_dims, constants)],
            splittings=[s for s in splittings if s],
            chunkings=[c for c in chunkings if c],
        )


def dense_request(inputs: AttentionInputs, request: int) -> DenseRequest:
    """One request's dense tensors. Reads referenced slots only."""
    if isinstance(inputs, LayerInputs):
        from mla_verify.layer_expected import read_request

        return read_request(inputs, request).expanded
    start, end = inputs.q_range(request)
    if isinstance(inputs, AbsorbedInputs):
        q: tuple[Tensor, ...] = (inputs.q_nope[start:end], inputs.q_pe[start:end])
        caches = (inputs.ckv_cache, inputs.kpe_cache)
        k = tuple(gather_by_page_table(cache, inputs.page_table, inputs.kv_lens, request) for cache in caches)
    else:
        kv = slice(int(inputs.kv_indptr[request]), int(inputs.kv_indptr[request + 1]))
        q, k = (inputs.q[start:end],), (inputs.k[kv], inputs.v[kv])
    return DenseRequest(q, k, inputs.qk_dims, inputs.sm_scale, inputs.causal)


@dataclass(frozen=True)
class Expected:
    """The reference over all requests, [T, H, ..], and the noise by rounding facts."""

    attention: Attention
    noise: dict[RoundingFacts, Noise]


def expect(inputs: AttentionInputs, facts: Sequence[RoundingFacts], constants: Constants = CONSTANTS) -> Expected:
    """The float64 attention of every request and the noise of each of `facts`, in one pass over the keys.

    Raises UsageError when there is none, because a tensor holds NaN or infinity where a request reads it.
    """
    distinct = list(dict.fromkeys(facts))
    if isinstance(inputs, LayerInputs):
        from mla_verify.layer_expected import expect_layer

        return expect_layer(inputs, distinct, constants)
    parts = []
    for b in range(inputs.num_requests):
        request = dense_request(inputs, b)
        parts.append(request.attend(distinct, constants))
        if not bool(parts[-1].out.isfinite().all() and parts[-1].mean_score.isfinite().all()):
            names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache") if len(request.q) == 2 else ("q", "k", "v")
            refuse(dict(zip(names, (*request.q, *request.k), strict=True)), inputs.sm_scale, b)
    whole = concatenate(parts)
    noise = noises_of(whole, distinct, constants, inputs.qk_dims)
    return Expected(whole, dict(zip(distinct, noise, strict=True)))


def noises_of(
    whole: Attention,
    facts: Sequence[RoundingFacts],
    constants: Constants,
    qk_dims: tuple[int, int],
    beside: Sequence[Beside | None] = (),
) -> list[Noise]:
    """The noise of each of `facts`, with which `whole` was computed by DenseRequest.attend. beside: one for each."""
    noises = []
    at_split = at_chunk = 0
    for i, f in enumerate(facts):
        has_split, has_chunk = splitting(f) is not None, chunking(f) is not None
        mine = replace(
            whole,
            sums=whole.sums[4 * i : 4 * i + 4],
            splits=whole.splits[at_split : at_split + has_split],
            chunks=whole.chunks[at_chunk : at_chunk + has_chunk],
        )
        at_split, at_chunk = at_split + has_split, at_chunk + has_chunk
        noises.append(noise_of(mine, f, constants, qk_dims, beside[i] if beside else None))
    return noises


def refuse(tensors: Mapping[str, Tensor], sm_scale: float, number: int) -> None:
    """Raise for the first input that is not finite: no kernel is to blame for what follows from it."""
    for name, tensor in {**tensors, "sm_scale": torch.tensor(sm_scale)}.items():
        if not bool(tensor.isfinite().all()):
            raise UsageError(
                f"{name} holds NaN or infinity where request {number} reads it, so that no output is right",
                "give finite inputs; slots that no request references may hold anything",
            )


def concatenate(parts: list[Attention]) -> Attention:
    def cat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    sums = tuple(
        KeySums(*(cat([getattr(s, f.name) for s in column]) for f in fields(KeySums)))
        for column in zip(*(p.sums for p in parts), strict=True)
    )
    splits = tuple(
        SplitRounding(cat([r.variance for r in column]), cat([r.tilt for r in column]))
        for column in zip(*(p.splits for p in parts), strict=True)
    )
    chunks = tuple(
        ChunkRounding(*(cat([getattr(c, f.name) for c in column]) for f in fields(ChunkRounding)))
        for column in zip(*(p.chunks for p in parts), strict=True)
    )
    plain = {
        name: cat([getattr(p, name) for p in parts])
        for name in ("out", "direction", "lse", "max_score", "mean_score", "score_along", "num_keys")
    }
    return Attention(**plain, sums=sums, splits=splits, chunks=chunks)
