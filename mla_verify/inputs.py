"""CaseSpec -> inputs: seeded, paged, permuted and poisoned. The same on every device, since they are made on the CPU.

Poison: every slot that no request references (tails of last pages, whole pages, page 0) holds NaN, page-table entries
past a request's last page are huge. A kernel that reads what it must not read returns NaN or dies.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_verify.cases import CaseSpec, Request
from mla_verify.formats import FORMATS
from mla_verify.regimes import REGIME_TABLE, DenseRequest
from mla_verify.tensors import AbsorbedInputs, MHAInputs, MLAInputs

POISON = float("nan")
# As an index far outside any cache, as a page number times any page size past int32: no read through it goes unnoticed.
GARBAGE_PAGE = 2_147_480_000
_SPARE_PAGES = 3  # pages nobody references; page 0 is one of them, since engines reserve it for padding


def make_inputs(spec: CaseSpec, device: str = "cpu", poison: float = POISON) -> MLAInputs:
    """The inputs of a case: a function of its id and `poison` alone."""
    # A seed of the whole id: cases that differ in anything share no numbers.
    generator = torch.Generator().manual_seed(zlib.crc32(spec.id.encode()))
    dense = [_dense(spec, request, generator) for request in spec.requests]
    dtype = FORMATS[spec.dtype].torch_dtype
    if spec.form == "absorbed":
        inputs: MLAInputs = _paged(spec, dense, dtype, generator, poison)
    else:
        kv_lens = torch.tensor([r.kv_len for r in spec.requests])
        inputs = MHAInputs(
            qo_indptr=_indptr([r.q_len for r in spec.requests]),
            kv_lens=kv_lens.int(),
            sm_scale=spec.sm_scale,
            causal=spec.causal,
            q=torch.cat([torch.cat([r.q_nope, r.q_pe], dim=-1) for r in dense]).to(dtype),
            k=torch.cat([torch.cat([r.k_nope, _per_head(r.kpe, spec)], dim=-1) for r in dense]).to(dtype),
            v=torch.cat([r.v for r in dense if r.v is not None]).to(dtype),
            kv_indptr=_indptr(kv_lens.tolist()),
            qk_rope_head_dim=spec.dims.qk_rope_head_dim,
        )
    return move(inputs, device)


def move(inputs: MLAInputs, device: str) -> MLAInputs:
    """The same inputs on another device; as they are when they are there already."""
    if inputs.device.type == device:
        return inputs
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in inputs.named_tensors().items()}
    return replace(inputs, **moved)


def _per_head(kpe: Tensor, spec: CaseSpec) -> Tensor:
    return kpe[:, None].expand(-1, spec.num_heads, -1)


def _dense(spec: CaseSpec, request: Request, generator: torch.Generator) -> DenseRequest:
    d, heads = spec.dims, spec.num_heads
    absorbed = spec.form == "absorbed"
    nope, key_heads = (d.kv_lora_rank, 1) if absorbed else (d.qk_nope_head_dim, heads)
    num_keys = torch.full((request.q_len,), request.kv_len)
    if spec.causal:
        num_keys = (torch.arange(request.q_len) + request.kv_len - request.q_len + 1).clamp_min(0)
    dense = DenseRequest(
        q_nope=torch.randn(request.q_len, heads, nope, generator=generator),
        q_pe=torch.randn(request.q_len, heads, d.qk_rope_head_dim, generator=generator),
        k_nope=torch.randn(request.kv_len, key_heads, nope, generator=generator),
        kpe=torch.randn(request.kv_len, d.qk_rope_head_dim, generator=generator),
        v=None if absorbed else torch.randn(request.kv_len, heads, d.v_head_dim, generator=generator),
        num_keys=num_keys,
        page_size=spec.page_size,
        sm_scale=spec.sm_scale,
        generator=generator,
    )
    REGIME_TABLE[spec.regime].edit(dense)
    return dense


def _paged(
    spec: CaseSpec, dense: list[DenseRequest], dtype: torch.dtype, generator: torch.Generator, poison: float
) -> AbsorbedInputs:
    size = spec.page_size
    used = [-(-r.kv_len // size) for r in spec.requests]
    num_pages = sum(used) + _SPARE_PAGES
    # A random order of pages 1 .. n - 1; page 0 stays unreferenced.
    pages = (torch.randperm(num_pages - 1, generator=generator) + 1).int()
    page_table = torch.full((len(used), max(used) + 2), GARBAGE_PAGE, dtype=torch.int32)
    ckv_cache = torch.full((num_pages * size, spec.dims.kv_lora_rank), poison, dtype=dtype)
    kpe_cache = torch.full((num_pages * size, spec.dims.qk_rope_head_dim), poison, dtype=dtype)
    taken = 0
    for b, (count, r) in enumerate(zip(used, dense, strict=True)):
        page_table[b, :count] = pages[taken : taken + count]
        slots = (page_table[b, :count, None].long() * size + torch.arange(size)).flatten()[: len(r.kpe)]
        ckv_cache[slots] = r.k_nope[:, 0].to(dtype)
        kpe_cache[slots] = r.kpe.to(dtype)
        taken += count
    return AbsorbedInputs(
        qo_indptr=_indptr([r.q_len for r in spec.requests]),
        kv_lens=torch.tensor([r.kv_len for r in spec.requests], dtype=torch.int32),
        sm_scale=spec.sm_scale,
        causal=spec.causal,
        q_nope=torch.cat([r.q_nope for r in dense]).to(dtype),
        q_pe=torch.cat([r.q_pe for r in dense]).to(dtype),
        ckv_cache=ckv_cache.view(num_pages, size, -1),
        kpe_cache=kpe_cache.view(num_pages, size, -1),
        page_table=page_table,
    )


def _indptr(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def poison_unreferenced(inputs: AbsorbedInputs, poison: float = POISON) -> AbsorbedInputs:
    """A copy whose unreferenced slots hold `poison` and whose unused page-table entries are huge."""
    num_pages, page_size = inputs.ckv_cache.shape[:2]
    used = torch.zeros(num_pages * page_size, dtype=torch.bool)
    page_table = inputs.page_table.clone()
    for b, kv_len in enumerate(inputs.kv_lens.tolist()):
        count = -(-kv_len // page_size)
        slots = (page_table[b, :count, None].long() * page_size + torch.arange(page_size)).flatten()[:kv_len]
        used[slots] = True
        page_table[b, count:] = GARBAGE_PAGE
    free = ~used.view(num_pages, page_size, 1)
    return replace(
        inputs,
        page_table=page_table,
        ckv_cache=inputs.ckv_cache.masked_fill(free, poison),
        kpe_cache=inputs.kpe_cache.masked_fill(free, poison),
    )
