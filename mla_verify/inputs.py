"""CaseSpec -> inputs: seeded, paged, permuted and poisoned. The same on every device, since they are made on the CPU.

Poison: every slot that no request references (tails of last pages, whole pages, page 0) holds NaN, page-table entries
past a request's last page are huge. A kernel that reads what it must not read returns NaN or dies.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mla_verify.cases import CaseSpec, Request
from mla_verify.formats import FORMATS
from mla_verify.layouts import place
from mla_verify.regimes import REGIME_TABLE, DenseRequest
from mla_verify.tensors import AbsorbedInputs, LayerInputs, MHAInputs, MLAInputs

_Paged = TypeVar("_Paged", bound=AbsorbedInputs | LayerInputs)

POISON = float("nan")
# As an index far outside any cache, as a page number times any page size past int32: no read through it goes unnoticed.
GARBAGE_PAGE = 2_147_480_000
_SPARE_PAGES = 3  # pages nobody references; page 0 is one of them, since engines reserve it for padding


def make_inputs(spec: CaseSpec, device: str = "cpu", poison: float = POISON) -> MLAInputs:
    """The inputs of a case: a function of its id and `poison` alone. Layouts hold the same numbers."""
    if spec.form == "concat":
        from mla_verify.concat_inputs import make_concat_inputs

        return make_concat_inputs(spec, device)
    # A seed of the whole id: cases that differ in anything but the layout share no numbers.
    generator = torch.Generator().manual_seed(zlib.crc32(replace(spec, layout="split").id.encode()))
    if spec.form == "write":
        from mla_verify.write_inputs import make_write_inputs

        inputs: MLAInputs = make_write_inputs(spec, generator, poison)
    elif spec.form == "layer":
        from mla_verify.layer_inputs import make_layer_inputs

        inputs = make_layer_inputs(spec, generator, poison)
    else:
        dense = [_dense(spec, request, generator) for request in spec.requests]
        inputs = paged(spec, dense, generator, poison) if spec.form == "absorbed" else _ragged(spec, dense)
    inputs = move(inputs, device)
    return inputs if spec.layout == "split" else place(inputs, spec.layout, poison=poison).inputs


def _ragged(spec: CaseSpec, dense: list[DenseRequest]) -> MHAInputs:
    dtype = FORMATS[spec.dtype].torch_dtype
    kv_lens = torch.tensor([r.kv_len for r in spec.requests])
    return MHAInputs(
        qo_indptr=indptr([r.q_len for r in spec.requests]),
        kv_lens=kv_lens.int(),
        sm_scale=spec.sm_scale,
        causal=spec.causal,
        q=torch.cat([torch.cat([r.q_nope, r.q_pe], dim=-1) for r in dense]).to(dtype),
        k=torch.cat([torch.cat([r.k_nope, _per_head(r.kpe, spec)], dim=-1) for r in dense]).to(dtype),
        v=torch.cat([r.v for r in dense if r.v is not None]).to(dtype),
        kv_indptr=indptr(kv_lens.tolist()),
        qk_rope_head_dim=spec.dims.qk_rope_head_dim,
    )


def move(inputs: MLAInputs, device: str) -> MLAInputs:
    """The same inputs on another device; as they are when they are there already."""
    if inputs.device.type == device:
        return inputs
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in inputs.named_tensors().items()}
    return replace(inputs, **moved)


def alone(inputs: MLAInputs, request: int) -> MLAInputs:
    """One request of attention inputs as a batch of one, on the same cache: views of the same numbers."""
    queries, keys, one = slice(*inputs.q_range(request)), slice(None), slice(request, request + 1)
    if isinstance(inputs, MHAInputs):
        keys = slice(int(inputs.kv_indptr[request]), int(inputs.kv_indptr[request + 1]))
    parts = {"q_nope": queries, "q_pe": queries, "q": queries, "k": keys, "v": keys, "page_table": one, "kv_lens": one}
    mine: dict[str, Any] = {name: t[parts[name]] for name, t in inputs.named_tensors().items() if name in parts}
    for name in ("qo_indptr", "kv_indptr"):
        if hasattr(inputs, name):
            starts = getattr(inputs, name)[request : request + 2]
            mine[name] = starts - starts[0]
    return replace(inputs, **mine)


def _per_head(kpe: Tensor, spec: CaseSpec) -> Tensor:
    return kpe[:, None].expand(-1, spec.num_heads, -1)


def _dense(spec: CaseSpec, request: Request, generator: torch.Generator) -> DenseRequest:
    d, heads = spec.dims, spec.num_heads
    absorbed = spec.form == "absorbed"
    nope, key_heads = (d.kv_lora_rank, 1) if absorbed else (d.qk_nope_head_dim, heads)
    dense = DenseRequest(
        q_nope=torch.randn(request.q_len, heads, nope, generator=generator),
        q_pe=torch.randn(request.q_len, heads, d.qk_rope_head_dim, generator=generator),
        k_nope=torch.randn(request.kv_len, key_heads, nope, generator=generator),
        kpe=torch.randn(request.kv_len, d.qk_rope_head_dim, generator=generator),
        v=None if absorbed else torch.randn(request.kv_len, heads, d.v_head_dim, generator=generator),
        num_keys=visible(spec, request),
        page_size=spec.page_size,
        sm_scale=spec.sm_scale,
        generator=generator,
    )
    REGIME_TABLE[spec.regime].edit(dense)
    return dense


def paged(spec: CaseSpec, dense: list[DenseRequest], generator: torch.Generator, poison: float) -> AbsorbedInputs:
    """The requests' queries in a row, their keys in permuted pages: k_nope [kv_len, 1, R] is the latent."""
    dtype = FORMATS[spec.dtype].torch_dtype
    num_pages, page_table = permuted_pages(spec, generator)
    ckv_cache = torch.full((num_pages * spec.page_size, spec.dims.kv_lora_rank), poison, dtype=dtype)
    kpe_cache = torch.full((num_pages * spec.page_size, spec.dims.qk_rope_head_dim), poison, dtype=dtype)
    for b, r in enumerate(dense):
        slots = slots_of(page_table, b, spec.page_size, len(r.kpe))
        ckv_cache[slots] = r.k_nope[:, 0].to(dtype)
        kpe_cache[slots] = r.kpe.to(dtype)
    return AbsorbedInputs(
        qo_indptr=indptr([r.q_len for r in spec.requests]),
        kv_lens=torch.tensor([r.kv_len for r in spec.requests], dtype=torch.int32),
        sm_scale=spec.sm_scale,
        causal=spec.causal,
        q_nope=torch.cat([r.q_nope for r in dense]).to(dtype),
        q_pe=torch.cat([r.q_pe for r in dense]).to(dtype),
        ckv_cache=ckv_cache.view(num_pages, spec.page_size, -1),
        kpe_cache=kpe_cache.view(num_pages, spec.page_size, -1),
        page_table=page_table,
    )


def visible(spec: CaseSpec, request: Request) -> Tensor:
    """How many keys each query of a request sees, [q_len] int64."""
    if not spec.causal:
        return torch.full((request.q_len,), request.kv_len)
    return (torch.arange(request.q_len) + request.kv_len - request.q_len + 1).clamp_min(0)


def permuted_pages(spec: CaseSpec, generator: torch.Generator) -> tuple[int, Tensor]:
    """How many pages there are, and the page table: [B, max_pages] int32, pages in random order, garbage after them."""
    used = [-(-r.kv_len // spec.page_size) for r in spec.requests]
    num_pages = sum(used) + _SPARE_PAGES
    # A random order of pages 1 .. n - 1; page 0 stays unreferenced.
    pages = (torch.randperm(num_pages - 1, generator=generator) + 1).int()
    page_table = torch.full((len(used), max(used) + 2), GARBAGE_PAGE, dtype=torch.int32)
    taken = 0
    for b, count in enumerate(used):
        page_table[b, :count] = pages[taken : taken + count]
        taken += count
    return num_pages, page_table


def slots_of(page_table: Tensor, request: int, page_size: int, kv_len: int) -> Tensor:
    """The slot of each key of a request, [kv_len] int64."""
    pages = page_table[request, : -(-kv_len // page_size), None].long()
    return (pages * page_size + torch.arange(page_size, device=pages.device)).flatten()[:kv_len]


def indptr(lengths: list[int]) -> Tensor:
    """Where each part starts and the last one ends, [len(lengths) + 1] int32."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def poison_unreferenced(inputs: _Paged, poison: float = POISON) -> _Paged:
    """A copy whose unreferenced slots hold `poison` and whose unused page-table entries are huge."""
    num_pages, page_size = inputs.ckv_cache.shape[:2]
    used = torch.zeros(num_pages * page_size, dtype=torch.bool, device=inputs.device)
    page_table = inputs.page_table.clone()
    for b, kv_len in enumerate(inputs.kv_lens.tolist()):
        used[slots_of(page_table, b, page_size, kv_len)] = True
        page_table[b, -(-kv_len // page_size) :] = GARBAGE_PAGE
    free = ~used.view(num_pages, page_size, 1)
    return replace(
        inputs,
        page_table=page_table,
        ckv_cache=inputs.ckv_cache.masked_fill(free, poison),
        kpe_cache=inputs.kpe_cache.masked_fill(free, poison),
    )
