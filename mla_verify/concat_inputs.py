"""Concatenations: inputs of any bits, made where they are wanted, and the layouts in which engines hold them.

A concatenation that passes 2^31 elements takes 4.3 GB of 16-bit numbers: too many to draw on a CPU. Every element is a
hash of its place instead, by integer arithmetic alone, so that all devices make the same ones, each its own.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import torch
from torch import Tensor

from mla_verify.cases import CaseSpec
from mla_verify.dims import MLADims
from mla_verify.formats import FORMATS, FloatFormat
from mla_verify.inputs import indptr
from mla_verify.room import ensure_room
from mla_verify.tensors import UNWRITTEN, ConcatInputs

_BITS = {2: torch.int16, 4: torch.int32}
# Elements that are hashed at a time: what stays in a core's cache, and what keeps a GPU busy.
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}
# What lies beside a slice in the tensor that it is cut from.
_BESIDE = 0x5A
_DIMS = MLADims()


def make_concat_inputs(spec: CaseSpec, device: str) -> ConcatInputs:
    """The inputs of a case, a function of its id alone; layouts hold the same bits.

    About one element in 32 is what arithmetic would change: -0, infinity, a subnormal number, NaN with a payload.
    Raises MemoryError where they, a kernel's copy and its output do not fit into what is free.
    """
    d, num_tokens, fmt = spec.dims, spec.num_q_tokens, FORMATS[spec.dtype]
    queries = spec.phase == "queries"
    nope = (num_tokens, spec.num_heads, d.kv_lora_rank if queries else d.qk_nope_head_dim)
    rope = (num_tokens, spec.num_heads if queries else 1, d.qk_rope_head_dim)
    elements = 2 * (math.prod(nope) + math.prod(rope)) + math.prod(nope[:2]) * (nope[2] + rope[2])
    room = elements * fmt.torch_dtype.itemsize
    ensure_room(room, torch.device(device), "a concatenation with its inputs, a copy of them and the result")
    name = replace(spec, layout="split").id
    inputs = ConcatInputs(
        qo_indptr=indptr([r.q_len for r in spec.requests]).to(device),
        kv_lens=torch.tensor([r.kv_len for r in spec.requests], dtype=torch.int32, device=device),
        nope=scattered_bits(nope, fmt, f"{name} nope", device),
        rope=scattered_bits(rope, fmt, f"{name} rope", device),
    )
    return inputs if spec.layout == "split" else lay_out(inputs, spec.layout)


def scattered_bits(shape: tuple[int, int, int], fmt: FloatFormat, name: str, device: str) -> Tensor:
    """[T, H, D] of `fmt`: the bits of element (t, h, d) are a hash of t * H + h, of d and of `name`.

    No two rows have the same hashes: they are one-to-one in the row. UNWRITTEN in every byte does not occur.
    """
    num_rows, dim = shape[0] * shape[1], shape[2]
    bits = torch.empty(num_rows, dim, dtype=_BITS[fmt.torch_dtype.itemsize], device=device)
    columns = _mixed(torch.arange(dim, dtype=torch.int32, device=device) ^ _key(f"{name} columns"))
    key, table, unwritten = _key(f"{name} rows"), _special(fmt).to(device), unwritten_bits(bits.dtype)
    step = max(1, _BLOCK[torch.device(device).type] // max(1, dim))
    for first in range(0, num_rows, step):
        rows = torch.arange(first, min(first + step, num_rows), dtype=torch.int32, device=device)
        hashed = _mixed(_mixed(rows ^ key)[:, None] ^ columns)
        block = torch.where(hashed >> 27 == 0, table[(hashed >> 24) & 7], hashed.to(bits.dtype))
        bits[first : first + step] = torch.where(block == unwritten, unwritten ^ 1, block)
    return bits.view(fmt.torch_dtype).view(shape)


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 (Appleby, fmix32), one-to-one on 32 bits. x: int32, changed in place.

    Products wrap around, and shifts are made logical by masks.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x85EBCA6B - (1 << 32)
    x ^= (x >> 13) & 0x7FFFF
    x *= 0xC2B2AE35 - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def _key(name: str) -> int:
    """A signed 32-bit number."""
    return zlib.crc32(name.encode()) - (1 << 31)


def _special(fmt: FloatFormat) -> Tensor:
    """The bits of eight numbers that a copy keeps and arithmetic may not."""
    size, m = 8 * fmt.torch_dtype.itemsize, fmt.mantissa_bits
    sign, infinity = 1 << (size - 1), (1 << (size - 1)) - (1 << m)
    values = [
        sign,  # -0
        infinity,
        sign | infinity,
        infinity - 1,  # the largest finite number
        1,  # the smallest subnormal one
        sign | ((1 << m) - 1),  # the largest subnormal one, negative
        infinity | 1 << (m - 1) | 5,  # a quiet NaN with a payload
        infinity | 3,  # a signalling NaN
    ]
    signed = [value - (1 << size) if value & sign else value for value in values]
    return torch.tensor(signed, dtype=_BITS[size // 8])


def unwritten_bits(dtype: torch.dtype) -> int:
    """What an element of this integer dtype holds in an output buffer that nobody wrote."""
    return int.from_bytes(bytes([UNWRITTEN] * dtype.itemsize), "little", signed=True)


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory as integers: NaN equals itself, and -0.0 is not 0.0."""
    return tensor.view(_BITS[tensor.element_size()])


def lay_out(inputs: ConcatInputs, layout: str) -> ConcatInputs:
    """A copy with the same bits, lying in memory as an engine has them. What lies beside a slice is 0x5A.

    split: contiguous.
    fused: queries, both parts of one [T, H, D + P].  keys, nope of [T, H, D + v_head_dim], as kv_b_proj gives it, and
    rope of the latent row [T, 1, kv_lora_rank + P].
    transposed: nope [H, T, D] in memory, as a product by head gives it, and rope the end of [.., qk_nope_head_dim + P].
    """
    nope, rope = inputs.nope, inputs.rope
    if layout == "split":
        return replace(inputs, nope=nope.clone(), rope=rope.clone())
    if layout == "transposed":
        by_head = torch.empty_like(nope.transpose(0, 1), memory_format=torch.contiguous_format)
        wide = _beside(rope, _DIMS.qk_nope_head_dim + rope.shape[-1])
        views = by_head.transpose(0, 1), wide[..., _DIMS.qk_nope_head_dim :]
    elif rope.shape[1] == nope.shape[1]:
        views = _beside(nope, inputs.out_shape[-1]).split([nope.shape[-1], rope.shape[-1]], dim=-1)
    else:
        latent = _beside(rope, _DIMS.kv_lora_rank + rope.shape[-1])
        views = (
            _beside(nope, nope.shape[-1] + _DIMS.v_head_dim)[..., : nope.shape[-1]],
            latent[..., _DIMS.kv_lora_rank :],
        )
    for view, part in zip(views, (nope, rope), strict=True):
        bits_of(view).copy_(bits_of(part))
    return replace(inputs, nope=views[0], rope=views[1])


def _beside(part: Tensor, dim: int) -> Tensor:
    """[T, H, dim] for `part` to be a slice of."""
    size = part.shape[0] * part.shape[1] * dim * part.element_size()
    whole = torch.full((size,), _BESIDE, dtype=torch.uint8, device=part.device)
    return whole.view(part.dtype).view(*part.shape[:2], dim)
