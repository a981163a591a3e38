"""Attention over the parts of a request's keys, merged one after the other, as engines attend over a cached prefix.

The new keys of each request, its last q_len, come first and causally; its cached keys follow in chunks of a fixed
number, which every new query sees whole. A request that ends before the batch's last chunk has an empty part there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from mla_verify.kernels.contract import KernelBase

if TYPE_CHECKING:
    from torch import Tensor

    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import MHAInputs, MLAOutput

# No multiple of a tile, as engines' are not that share a budget among the requests of a batch. The suites' cached
# prefixes have 1 to 21 chunks of it, whose last ones are partial, beside shorter requests whose last ones are empty.
CHUNK = 96
# Without prefill: a request without cached keys has one part, and nothing is merged.
MERGED_PHASES = ("decode", "spec", "prefix", "chunked", "mixed")
MORE_QUERIES = "a request has more queries than keys, and each new query brings its key in a chunked prefix"


def parts_of(inputs: MHAInputs, chunk: int) -> list[MHAInputs]:
    """Inputs whose keys are those of one part each, all with every query: the new keys, then chunks of cached ones.

    Raises ValueError for a request with more queries than keys.
    """
    q_lens, kv_lens = inputs.qo_indptr.diff().tolist(), inputs.kv_lens.tolist()
    # A request without queries brings no keys and attends over none.
    cached = [n - q_len if q_len else 0 for q_len, n in zip(q_lens, kv_lens, strict=True)]
    if min(cached, default=0) < 0:
        raise ValueError(MORE_QUERIES)
    parts = [_part(inputs, cached, q_lens, inputs.causal)]
    for first in range(0, max(cached, default=0), chunk):
        lens = [max(0, min(chunk, n - first)) for n in cached]
        parts.append(_part(inputs, [first] * len(lens), lens, False))
    return parts


def _part(inputs: MHAInputs, firsts: list[int], lens: list[int], causal: bool) -> MHAInputs:
    """`lens` keys of each request, from `firsts` on, copied as an engine expands them from its cache."""
    import torch

    from mla_verify.inputs import indptr

    starts = inputs.kv_indptr.tolist()
    spans = [torch.arange(s + f, s + f + n) for s, f, n in zip(starts, firsts, lens, strict=False)]
    at = torch.cat(spans).to(inputs.device)
    return replace(
        inputs,
        k=inputs.k[at],
        v=inputs.v[at],
        kv_indptr=indptr(lens).to(inputs.device),
        kv_lens=torch.tensor(lens, dtype=torch.int32, device=inputs.device),
        causal=causal,
    )


def empty_state(inputs: MHAInputs) -> tuple[Tensor, Tensor]:
    """out [T, H, V] and lse [T, H] float32 of attention over no key, in the inputs' dtype and on their device."""
    import torch

    num_tokens, num_heads = inputs.q.shape[:2]
    out = torch.zeros(num_tokens, num_heads, inputs.v_dim, dtype=inputs.q.dtype, device=inputs.device)
    return out, torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=inputs.device)


class MergedKernel(KernelBase, ABC):
    """Attention in parts by `attend`, merged by `merge`; LSEs are in the contract's base throughout."""

    name: str
    chunk = CHUNK
    _what = "nothing: no request has a query"

    @abstractmethod
    def attend(self, part: MHAInputs) -> tuple[Tensor, Tensor]:
        """out [T, H, V] and lse [T, H] of one part. Rows without keys have whatever the kernel gives them."""

    @abstractmethod
    def merge(self, part: tuple[Tensor, Tensor], merged: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Both in one."""

    def ran(self) -> str:
        return self._what

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        if any(request.q_len > request.kv_len for request in spec.requests):
            return MORE_QUERIES
        return super().why_not(spec, device)

    def run(self, inputs: MHAInputs, out: MLAOutput) -> MLAOutput:
        if not len(inputs.q):
            return out
        parts = parts_of(inputs, self.chunk)
        merged = self.attend(parts[0])
        for part in parts[1:]:
            merged = self.merge(self.attend(part), merged)
        out.out.copy_(merged[0])
        if out.lse is not None:
            out.lse.copy_(merged[1])
        return out
