"""An honest kernel, emulated: online softmax over tiles and splits with each rounding of a real kernel made explicit.

Products are exact or fp32, as on tensor cores; probabilities, partial outputs and results are rounded where told. Used
to calibrate the error model and to inject faults into; it runs anywhere torch does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mla_verify.kernels.contract import RoundingFacts
from mla_verify.reference.paged import gather_by_page_table
from mla_verify.tensors import AbsorbedInputs, AttentionInputs, MHAInputs, MLAOutput


@dataclass(frozen=True)
class EmulatedKernel:
    """How the emulated kernel computes. dtype is the case's; "same" stands for it."""

    splits: int = 1
    tile: int = 64
    rounds_p: bool = True  # P in the case's dtype before P.V, else fp32
    rowsum: Literal["rounded", "unrounded"] = "unrounded"
    rounds_partials: bool = False  # split outputs stored in the case's dtype, else fp32
    base2: bool = True  # exp2 of scores that carry log2 e, as GPU kernels compute
    tensor_cores: bool = False  # q.k and P.V as Hopper's tensor cores sum 16-bit products

    def facts(self, dtype: str) -> RoundingFacts:
        return RoundingFacts(
            out_dtype=dtype,
            p_dtype=dtype if self.rounds_p else "fp32",
            rowsum=self.rowsum,
            partial_dtype=dtype if self.rounds_partials else "fp32",
            max_splits=self.splits,
            tile=16 if self.tensor_cores else self.tile,
            tensor_core_k=16 if self.tensor_cores else None,
            sources=("mla_verify/emulate.py",),
        )

    def run(self, inputs: AttentionInputs) -> MLAOutput:
        """out in the inputs' dtype, lse float32 in natural log."""
        outs, lses = [], []
        for request in range(inputs.num_requests):
            start, end = inputs.q_range(request)
            q, k, v = _dense(inputs, request, start, end)
            out, lse = self._attend(q, k, v, inputs)
            outs.append(out.transpose(0, 1))
            lses.append(lse.transpose(0, 1))
        return MLAOutput(torch.cat(outs).to(inputs.queries.dtype), torch.cat(lses))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """q [H, q_len, D], k [Hk, kv_len, D], v [Hk, kv_len, V], float32 -> out [H, q_len, V], lse [H, q_len]."""
        q_len, kv_len = q.shape[1], k.shape[1]
        seen = torch.full((q_len, 1), kv_len, device=q.device)
        if inputs.causal:
            seen = (torch.arange(q_len, device=q.device) + kv_len - q_len + 1)[:, None]
        step = max(1, -(-kv_len // self.splits // self.tile)) * self.tile
        states = [
            self._part(q, k, v, slice(first, min(first + step, kv_len)), seen, inputs)
            for first in range(0, max(kv_len, 1), step)
        ]
        outs, lses = torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states])
        if len(states) == 1:
            return outs[0], lses[0]
        if self.rounds_partials:
            outs = outs.to(inputs.queries.dtype).float()
        top = lses.amax(0)
        top = top.masked_fill(top.isneginf(), 0.0)
        weight = torch.exp(lses - top)
        total = weight.sum(0)
        safe = total.masked_fill(total == 0, 1.0)
        return (weight[..., None] * outs).sum(0) / safe[..., None], top + total.log()

    def _part(
        self, q: Tensor, k: Tensor, v: Tensor, part: slice, seen: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """One split: online softmax over its tiles, in fp32."""
        p_dtype = inputs.queries.dtype if self.rounds_p else torch.float32
        scale = torch.tensor(inputs.sm_scale, dtype=torch.float32)
        if self.base2:
            scale = scale * torch.tensor(math.log2(math.e), dtype=torch.float32)
        top = q.new_full((*q.shape[:2], 1), -math.inf)
        total = torch.zeros_like(top)
        acc = q.new_zeros(*q.shape[:2], v.shape[2])
        exp = torch.exp2 if self.base2 else torch.exp
        for first in range(part.start, part.stop, self.tile):
            keys = slice(first, min(first + self.tile, part.stop))
            score = self._dot(q, k[:, keys].transpose(1, 2)) * scale.to(q.device)
            hidden = torch.arange(keys.start, keys.stop, device=q.device) >= seen
            score = score.masked_fill(hidden, -math.inf)
            new_top = torch.maximum(top, score.amax(-1, keepdim=True))
            base = new_top.masked_fill(new_top.isneginf(), 0.0)
            p = exp(score - base)
            alpha = exp(top - base)
            rounded = p.to(p_dtype).float()
            total = total * alpha + (rounded if self.rowsum == "rounded" else p).sum(-1, keepdim=True)
            acc = self._dot(rounded, v[:, keys], acc * alpha)
            top = new_top
        safe = total.masked_fill(total == 0, 1.0)
        top = top.masked_fill(top.isneginf(), 0.0)
        lse = (top + total.log2()) * math.log(2) if self.base2 else top + total.log()
        return acc / safe, lse.squeeze(-1)

    def _dot(self, a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
        """acc + a @ b in float32, the one or the other way."""
        if self.tensor_cores:
            return tensor_core_dot(a, b, acc)
        return a @ b if acc is None else acc + a @ b


def tensor_core_dot(a: Tensor, b: Tensor, acc: Tensor | None = None, k: int = 16) -> Tensor:
    """acc + a @ b as Hopper's tensor cores sum 16-bit products into float32: bit-equal to mma and wgmma on an H200.

    a [.., M, K], b [.., K, N], acc [.., M, N], float32. Each instruction adds k products to acc: all addends are cut
    off, towards 0, on a grid of 2^-25 of the largest power of two among them, added exactly, and the sum is cut off to
    24 bits. The power of two of a product is that of its factors, before a carry. (docs/evidence/tensor-cores.json)
    """
    a, b = a.double(), b.double().transpose(-1, -2)
    total = torch.zeros(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2]).to(a)
    if acc is not None:
        total = total + acc
    for first in range(0, a.shape[-1], k):
        left, right = a[..., :, None, first : first + k], b[..., None, :, first : first + k]
        products = left * right
        power = (_power(left) + _power(right)).masked_fill(products == 0, _NONE).amax(-1)
        power = torch.maximum(power, _power(total))
        summed = _cut(products, power[..., None] - 25).sum(-1) + _cut(total, power - 25)
        total = _cut(summed, _power(summed) - 23)
    return total.float()


_NONE = -2000  # the power of two of 0, below any other


def _power(x: Tensor) -> Tensor:
    """The exponent of the power of two at or below |x|."""
    return (torch.frexp(x).exponent - 1).masked_fill(x == 0, _NONE)


def _cut(x: Tensor, power: Tensor) -> Tensor:
    """x towards 0 on a grid of 2^power."""
    grid = torch.ldexp(torch.ones_like(x), power.clamp_min(-1000))
    return torch.trunc(x / grid) * grid


def _dense(inputs: AttentionInputs, request: int, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(inputs, AbsorbedInputs):
        ckv, kpe = (
            gather_by_page_table(cache, inputs.page_table, inputs.kv_lens, request)
            for cache in (inputs.ckv_cache, inputs.kpe_cache)
        )
        q = torch.cat([inputs.q_nope[start:end], inputs.q_pe[start:end]], dim=-1)
        return q.float().transpose(0, 1), torch.cat([ckv, kpe], dim=-1).float()[None], ckv.float()[None]
    assert isinstance(inputs, MHAInputs), "a layer is made of kernels of the other forms"
    kv = slice(int(inputs.kv_indptr[request]), int(inputs.kv_indptr[request + 1]))
    q, k, v = (t.float().transpose(0, 1) for t in (inputs.q[start:end], inputs.k[kv], inputs.v[kv]))
    return q, k, v
