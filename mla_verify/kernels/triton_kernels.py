"""MLA in Triton: decode over split keys, prefill, and the cache write. Imports triton.

Shapes as in tensors.py: T tokens, H heads, R kv_lora_rank, P qk_rope_head_dim; R and P are powers of two from 16 on.
Latent and rope part are read apart, wherever their strides say they are: nothing is concatenated or copied.
"""

# Compile-time constants are in capitals, as in Triton's own kernels. A kernel's other parameters have no types: what
# they are depends on the call.
# ruff: noqa: N803
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from mla_verify.tensors import AbsorbedInputs, MLAOutput

HEAD_BLOCK = 16  # decode: heads of one token; the fewest rows that a matrix instruction takes
ROW_BLOCK = 32  # prefill: an accumulator of [32, 512] fp32 is 64 registers a thread
FP32_ROW_BLOCK = 16  # without tensor cores the operands are in registers too, and 32 rows spill
KEY_TILE = 32  # in fp32, 576 numbers of each of 32 keys are 72 KiB of shared memory
MAX_SPLITS = 8
KEYS_PER_SPLIT = 64  # of the longest request; few, so that short requests are split and merged too
_WARPS = 8

_LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _attend(
    q_nope, q_pe, num_keys, first_key, end_key, scale,
    ckv_cache, ckv_page_stride, ckv_slot_stride, kpe_cache, kpe_page_stride, kpe_slot_stride, pages, page_size,
    ROWS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows' scores over keys first_key:end_key of one request, each row up to its num_keys.

    q_nope [ROWS, R], q_pe [ROWS, P].  num_keys [ROWS, 1], or one number for all rows.  pages points to the request's
    page numbers.  scale has log2(e) in it, so that exp2 does for exp.
    Returns fp32 out [ROWS, R] and lse [ROWS], base 2. A row that sees no key has out 0 and lse -inf.
    """
    minus_inf = float("-inf")
    row_max = tl.full([ROWS], minus_inf, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, R], tl.float32)
    for first in range(first_key, end_key, TILE):
        keys = first + tl.arange(0, TILE)
        # A key past the end has no page, and what its slot holds may be NaN, which a weight of 0 would not undo.
        exists = keys < end_key
        # As int64: a page number times a stride passes 2^31 in caches of a few GiB.
        page = tl.load(pages + keys // page_size, mask=exists, other=0).to(tl.int64)
        slot = (keys % page_size).to(tl.int64)
        ckv_at = page * ckv_page_stride + slot * ckv_slot_stride
        kpe_at = page * kpe_page_stride + slot * kpe_slot_stride
        ckv = tl.load(ckv_cache + ckv_at[:, None] + tl.arange(0, R)[None, :], mask=exists[:, None], other=0.0)
        kpe = tl.load(kpe_cache + kpe_at[:, None] + tl.arange(0, P)[None, :], mask=exists[:, None], other=0.0)

        scores = tl.dot(q_nope, tl.trans(ckv), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(kpe), scores, input_precision="ieee")
        visible = exists[None, :] & (keys[None, :] < num_keys)
        scores = tl.where(visible, scores * scale, minus_inf)

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # Of a row that has seen no key yet: -inf less -inf would be NaN.
        safe_max = tl.where(new_max == minus_inf, 0.0, new_max)
        p = tl.exp2(scores - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(p.to(ckv.dtype), ckv, acc, input_precision="ieee")
        row_max = new_max
    # A row with a key has a sum of at least 1, its largest p.
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    # Rounded to nearest: the quick division of a GPU errs by up to two units in the last place.
    return tl.div_rn(acc, safe_sum[:, None]), row_max + tl.log2(safe_sum)


@triton.jit
def decode_split(
    q_nope, nope_token_stride, nope_head_stride, q_pe, pe_token_stride, pe_head_stride, scale,
    ckv_cache, ckv_page_stride, ckv_slot_stride, kpe_cache, kpe_page_stride, kpe_slot_stride,
    page_table, page_table_stride, page_size, request_of, num_keys, part_out, part_lse, num_heads,
    HEADS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A block of heads of one token over one split of its keys, into part_out [S, T, H, R] and part_lse [S, T, H]."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    has_head = heads < num_heads
    nope_at = q_nope + token * nope_token_stride + heads[:, None] * nope_head_stride + tl.arange(0, R)[None, :]
    pe_at = q_pe + token * pe_token_stride + heads[:, None] * pe_head_stride + tl.arange(0, P)[None, :]
    request = tl.load(request_of + token)
    keys = tl.load(num_keys + token)
    # Equal parts of this token's keys, in whole tiles. The last ones may be empty.
    split_len = tl.cdiv(tl.cdiv(keys, tl.num_programs(2)), TILE) * TILE
    out, lse = _attend(
        tl.load(nope_at, mask=has_head[:, None], other=0.0), tl.load(pe_at, mask=has_head[:, None], other=0.0),
        keys, split * split_len, tl.minimum(keys, (split + 1) * split_len), scale,
        ckv_cache, ckv_page_stride, ckv_slot_stride, kpe_cache, kpe_page_stride, kpe_slot_stride,
        page_table + request * page_table_stride, page_size, HEADS, R, P, TILE,
    )  # fmt: skip
    row = (split * tl.num_programs(0) + token) * num_heads + heads
    tl.store(part_out + row[:, None] * R + tl.arange(0, R)[None, :], out, mask=has_head[:, None])
    tl.store(part_lse + row, lse, mask=has_head)


@triton.jit
def merge_splits(part_out, part_lse, out, lse, num_rows, num_splits, ROWS: tl.constexpr, R: tl.constexpr):
    """The splits' partial results of ROWS rows (token, head), into out [T, H, R] and lse [T, H], natural log."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = rows < num_rows
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    at = rows
    for _ in range(num_splits):
        row_max = tl.maximum(row_max, tl.load(part_lse + at, mask=exists, other=float("-inf")))
        at += num_rows
    safe_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, R], tl.float32)
    at = rows
    for _ in range(num_splits):
        # 0 for a split without keys, whose lse is -inf.
        weight = tl.exp2(tl.load(part_lse + at, mask=exists, other=float("-inf")) - safe_max)
        part = tl.load(part_out + at[:, None] * R + tl.arange(0, R)[None, :], mask=exists[:, None], other=0.0)
        row_sum += weight
        acc += weight[:, None] * part
        at += num_rows
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    merged = tl.div_rn(acc, safe_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * R + tl.arange(0, R)[None, :], merged, mask=exists[:, None])
    tl.store(lse + rows, (row_max + tl.log2(safe_sum)) * _LN2, mask=exists)


@triton.jit
def prefill(
    q_nope, nope_token_stride, nope_head_stride, q_pe, pe_token_stride, pe_head_stride, scale,
    ckv_cache, ckv_page_stride, ckv_slot_stride, kpe_cache, kpe_page_stride, kpe_slot_stride,
    page_table, page_table_stride, page_size, qo_indptr, kv_lens, out, lse, num_heads,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one request: its tokens' heads, in order. They share its keys, so heads can share a tile."""
    request = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_token = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - first_token
    kv_len = tl.load(kv_lens + request)
    exists = rows < q_len * num_heads
    query = rows // num_heads
    head = rows % num_heads
    token = (first_token + query).to(tl.int64)
    nope_row = q_nope + token * nope_token_stride + head * nope_head_stride
    pe_row = q_pe + token * pe_token_stride + head * pe_head_stride
    # Bottom-right: the last query sees every key. Of more queries than keys, the first see none.
    num_keys = kv_len - q_len + query + 1 if CAUSAL else kv_len + tl.zeros([ROWS], tl.int32)
    num_keys = tl.where(exists, tl.maximum(num_keys, 0), 0)
    end_key = tl.max(num_keys, axis=0)
    nope_at = nope_row[:, None] + tl.arange(0, R)[None, :]
    pe_at = pe_row[:, None] + tl.arange(0, P)[None, :]
    result, lse_base_2 = _attend(
        tl.load(nope_at, mask=exists[:, None], other=0.0), tl.load(pe_at, mask=exists[:, None], other=0.0),
        num_keys[:, None], 0, end_key, scale,
        ckv_cache, ckv_page_stride, ckv_slot_stride, kpe_cache, kpe_page_stride, kpe_slot_stride,
        page_table + request * page_table_stride, page_size, ROWS, R, P, TILE,
    )  # fmt: skip
    row = token * num_heads + head
    tl.store(out + row[:, None] * R + tl.arange(0, R)[None, :], result.to(out.dtype.element_ty), mask=exists[:, None])
    tl.store(lse + row, lse_base_2 * _LN2, mask=exists)


@triton.jit
def cache_write(
    ckv, ckv_stride, kpe, kpe_stride, slots, cache, cache_stride, num_slots, R: tl.constexpr, P: tl.constexpr
):
    """One token's latent and rope part, side by side into the row of its slot. Loads and stores alone: bits stay."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < num_slots):
        row = cache + slot * cache_stride
        latent = tl.arange(0, R)
        rope = tl.arange(0, P)
        tl.store(row + latent, tl.load(ckv + token * ckv_stride + latent))
        tl.store(row + R + rope, tl.load(kpe + token * kpe_stride + rope))


def launch_decode(inputs: AbsorbedInputs, out: MLAOutput, num_splits: int | None = None) -> int:
    """Attend and merge, into the contiguous out.out and out.lse. Returns the number of splits."""
    assert out.lse is not None
    tokens, heads, r = inputs.q_nope.shape
    if not tokens:
        return 0
    q_lens = inputs.qo_indptr.diff()
    requests = torch.arange(inputs.num_requests, device=inputs.device)
    request_of = requests.repeat_interleave(q_lens, output_size=tokens)
    num_keys = inputs.kv_lens[request_of]
    if inputs.causal:
        after = inputs.qo_indptr[request_of + 1] - torch.arange(1, tokens + 1, device=inputs.device)  # later queries
        num_keys = (num_keys - after).clamp_min(0)
    num_keys = num_keys.int()
    if num_splits is None:
        num_splits = min(max(triton.cdiv(int(num_keys.max()), KEYS_PER_SPLIT), 1), MAX_SPLITS)
    part_out = torch.empty(num_splits, tokens, heads, r, dtype=torch.float32, device=inputs.device)
    part_lse = torch.empty(num_splits, tokens, heads, dtype=torch.float32, device=inputs.device)
    grid = (tokens, triton.cdiv(heads, HEAD_BLOCK), num_splits)
    decode_split[grid](
        *_shared_arguments(inputs), request_of, num_keys, part_out, part_lse, heads,
        HEAD_BLOCK, r, inputs.q_pe.shape[-1], KEY_TILE, num_warps=_WARPS, num_stages=1,
    )  # fmt: skip
    rows = tokens * heads
    merge_splits[(triton.cdiv(rows, HEAD_BLOCK),)](
        part_out, part_lse, out.out, out.lse, rows, num_splits, HEAD_BLOCK, r, num_warps=_WARPS
    )
    return num_splits


def launch_prefill(inputs: AbsorbedInputs, out: MLAOutput) -> None:
    """Attend, into the contiguous out.out and out.lse."""
    tokens, heads, r = inputs.q_nope.shape
    if not tokens:
        return
    row_block = FP32_ROW_BLOCK if inputs.q_nope.dtype == torch.float32 else ROW_BLOCK
    longest = int(inputs.qo_indptr.diff().max())
    grid = (triton.cdiv(longest * heads, row_block), inputs.num_requests)
    prefill[grid](
        *_shared_arguments(inputs), inputs.qo_indptr, inputs.kv_lens, out.out, out.lse, heads,
        inputs.causal, row_block, r, inputs.q_pe.shape[-1], KEY_TILE, num_warps=_WARPS, num_stages=1,
    )  # fmt: skip


def _shared_arguments(inputs: AbsorbedInputs) -> tuple[torch.Tensor | int | float, ...]:
    """What both attention kernels take, in their order."""
    return (
        inputs.q_nope, *inputs.q_nope.stride()[:2], inputs.q_pe, *inputs.q_pe.stride()[:2],
        # One fp32 factor of the scores: Triton takes a Python float as fp32.
        inputs.sm_scale / math.log(2.0),
        inputs.ckv_cache, *inputs.ckv_cache.stride()[:2], inputs.kpe_cache, *inputs.kpe_cache.stride()[:2],
        inputs.page_table, inputs.page_table.stride(0), inputs.ckv_cache.shape[1],
    )  # fmt: skip


def launch_cache_write(ckv: torch.Tensor, kpe: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """ckv [T, R] and kpe [T, P] into rows slots [T] int64 of cache [num_slots, R + P], but for slots outside it."""
    if len(slots):
        cache_write[(len(slots),)](
            ckv, ckv.stride(0), kpe, kpe.stride(0), slots, cache, cache.stride(0), len(cache),
            ckv.shape[1], kpe.shape[1],
        )  # fmt: skip


def interpreted() -> bool:
    """Whether these kernels run in Triton's interpreter."""
    return not isinstance(cache_write, triton.JITFunction)
