"""Rotary position embedding as DeepSeek's models use it: plain RoPE, YaRN, and the softmax scale that YaRN changes.

Sources: RoFormer (arXiv 2104.09864) for the rotation; YaRN (arXiv 2309.00071), sections "NTK-by-parts" and "YaRN", for
frequencies and temperature; DeepSeek-V3's inference/model.py and the modeling_deepseek.py published with the V2 and V3
weights for the conventions. Where paper and code differ, the models were trained with the code and it is followed:

- The paper lets the ramp between interpolated and kept frequencies be linear in the number of rotations; the code
  makes it linear in the index of the frequency, between bounds rounded outwards to whole indices.
- The paper scales q and k alike by one temperature. DeepSeek splits it: mscale / mscale_all_dim multiplies cos and
  sin, hence only the rope part of q and k, and mscale_all_dim ** 2 multiplies the softmax scale, hence all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

# Which two elements of a vector of dim elements the frequency i rotates: 2i and 2i + 1, or i and i + dim / 2.
RopeStyle = Literal["interleaved", "half"]


@dataclass(frozen=True)
class YarnConfig:
    """YaRN by the names of `rope_scaling` in a DeepSeek config.json, with the defaults of its modeling code."""

    factor: float  # of context extension
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0  # frequencies that turn more often than this within the original length are kept
    beta_slow: float = 1.0  # frequencies that turn less often are divided by factor
    mscale: float = 1.0
    mscale_all_dim: float = 0.0  # 0 leaves the softmax scale alone

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position_embeddings < 1:
            raise ValueError(f"YaRN needs factor >= 1 and an original length >= 1, not {self}")
        if not self.beta_fast >= self.beta_slow > 0:
            raise ValueError(f"YaRN needs beta_fast >= beta_slow > 0, not {self.beta_fast} and {self.beta_slow}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotation of vectors of `dim` elements (qk_rope_head_dim). yarn None: plain RoPE."""

    dim: int = 64
    theta: float = 10000.0
    yarn: YarnConfig | None = None
    style: RopeStyle = "interleaved"  # every published DeepSeek and Kimi checkpoint

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"RoPE rotates pairs: dim is {self.dim}, it must be even and at least 2")
        if self.theta <= 1:
            raise ValueError(f"RoPE needs theta > 1, not {self.theta}")
        if self.style not in get_args(RopeStyle):
            raise ValueError(f"unknown RoPE style {self.style!r}, known: {', '.join(get_args(RopeStyle))}")


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1: the YaRN paper's sqrt(1 / t), with DeepSeek's weight `mscale` on the logarithm."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def amplitude(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by. 1 for plain RoPE and whenever mscale equals mscale_all_dim."""
    if rope.yarn is None:
        return 1.0
    y = rope.yarn
    return yarn_mscale(y.factor, y.mscale) / yarn_mscale(y.factor, y.mscale_all_dim)


def softmax_scale(qk_head_dim: int, rope: RopeConfig) -> float:
    """sm_scale of a model: qk_head_dim ** -0.5, times yarn_mscale(factor, mscale_all_dim) ** 2 where YaRN is used.

    qk_head_dim: qk_nope_head_dim + qk_rope_head_dim, also in the absorbed form: absorption changes how the same score
    is computed and not how large it is.
    """
    temperature = 1.0 if rope.yarn is None else yarn_mscale(rope.yarn.factor, rope.yarn.mscale_all_dim)
    return float(qk_head_dim**-0.5 * temperature**2)


def inv_freq(rope: RopeConfig) -> Tensor:
    """Radians per position: [dim / 2] float64, fastest first.

    Raises ValueError where no frequency lies between the two bounds, i.e. the original length is far too short.
    """
    index = torch.arange(rope.dim // 2, dtype=torch.float64)
    kept = rope.theta ** (-2.0 * index / rope.dim)
    if rope.yarn is None:
        return kept
    y = rope.yarn
    # The index whose frequency turns `rotations` times within the original length.
    low, high = (
        rope.dim * math.log(y.original_max_position_embeddings / (2 * math.pi * rotations)) / (2 * math.log(rope.theta))
        for rotations in (y.beta_fast, y.beta_slow)
    )
    # The upper limit is dim - 1 and not dim / 2 - 1, as in the code that the models were trained with.
    first, last = max(math.floor(low), 0), min(math.ceil(high), rope.dim - 1)
    if last < first:
        raise ValueError(f"YaRN's ramp would run from frequency {first} to {last} of {rope.dim // 2}: {y}")
    # 0 where a frequency is kept, 1 where it is divided by factor. A ramp of no width is a step after `first`.
    ramp = ((index - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return kept * (1.0 - ramp) + kept / y.factor * ramp


def rotate(x: Tensor, positions: Tensor, rope: RopeConfig) -> Tensor:
    """RoPE in float64; each pair (a, b) becomes amplitude * (a cos - b sin, a sin + b cos), where it was.

    x: [num_tokens, ..., dim], any float dtype.  positions: [num_tokens] int64, 0-based.
    Returns float64 of x's shape. Both styles keep the order of elements: no implicit change from one to the other.
    Raises ValueError for another last dimension than rope.dim and for positions that are not [num_tokens] int64.
    """
    if x.shape[-1] != rope.dim:
        raise ValueError(f"x ends in {x.shape[-1]} elements, RoPE is configured for {rope.dim}")
    if positions.dtype != torch.int64 or positions.shape != x.shape[:1]:
        raise ValueError(
            f"positions are {positions.dtype} {list(positions.shape)}, they must be int64 [{x.shape[0]}], one a token"
        )
    angle = positions.double()[:, None] * inv_freq(rope).to(x.device)  # [num_tokens, dim / 2]
    # Broadcast over whatever stands between tokens and elements, e.g. heads.
    angle = angle.reshape(len(positions), *[1] * (x.dim() - 2), rope.dim // 2)
    cos, sin = angle.cos() * amplitude(rope), angle.sin() * amplitude(rope)
    x = x.double()
    if rope.style == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
