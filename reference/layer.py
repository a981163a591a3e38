"""The whole MLA layer from a checkpoint's weights, in float64, absorbed and non-absorbed, with a growing latent cache.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and the full formulas of MLA in its appendix; tensor names and
layouts of the published checkpoints. The two forms differ in one step, `attend_heads`; all else is shared, so that a
difference between them is a difference in attention. One sequence at a time: hidden is [q_len, hidden_size].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mla_verify.reference.attention import attend_absorbed, attend_mha, expand_kv
from mla_verify.reference.rope import RopeConfig, rotate, softmax_scale

# absorbed: w_kc goes into the query and w_vc onto the output.  mha: both expand the latent into keys and values.
Form = Literal["absorbed", "mha"]


@dataclass(frozen=True)
class LayerConfig:
    hidden_size: int
    num_heads: int
    q_lora_rank: int | None  # None: q comes from one projection
    rope: RopeConfig  # its dim is qk_rope_head_dim
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    # Of the two norms inside the layer. DeepSeek's code takes 1e-6 here whatever the config's rms_norm_eps says.
    norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.rope.dim

    @property
    def sm_scale(self) -> float:
        return softmax_scale(self.qk_head_dim, self.rope)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the layer by its checkpoint name; projections are [out, in], as torch's Linear has them."""
        q_out = self.num_heads * self.qk_head_dim
        query: dict[str, tuple[int, ...]]
        if self.q_lora_rank is None:
            query = {"q_proj.weight": (q_out, self.hidden_size)}
        else:
            query = {
                "q_a_proj.weight": (self.q_lora_rank, self.hidden_size),
                "q_a_layernorm.weight": (self.q_lora_rank,),
                "q_b_proj.weight": (q_out, self.q_lora_rank),
            }
        return query | {
            "kv_a_proj_with_mqa.weight": (self.kv_lora_rank + self.rope.dim, self.hidden_size),
            "kv_a_layernorm.weight": (self.kv_lora_rank,),
            "kv_b_proj.weight": (self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            "o_proj.weight": (self.hidden_size, self.num_heads * self.v_head_dim),
        }


@dataclass(frozen=True, eq=False)
class QueryCompression:
    q_a_proj: Tensor  # [q_lora_rank, hidden_size]
    q_a_layernorm: Tensor  # [q_lora_rank]


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """float64, on one device. kv_b_proj is kept as its two halves, the paper's W_UK and W_UV."""

    q_a: QueryCompression | None
    q_proj: Tensor  # [num_heads * qk_head_dim, hidden_size]; after q_a, the checkpoint's q_b_proj [.., q_lora_rank]
    kv_a_proj: Tensor  # [kv_lora_rank + qk_rope_head_dim, hidden_size]: latent, then k_pe
    kv_a_layernorm: Tensor  # [kv_lora_rank]
    w_kc: Tensor  # [num_heads, qk_nope_head_dim, kv_lora_rank]
    w_vc: Tensor  # [num_heads, kv_lora_rank, v_head_dim]
    o_proj: Tensor  # [hidden_size, num_heads * v_head_dim]


@dataclass(frozen=True, eq=False)
class LatentCache:
    """What MLA caches of a sequence, float64. A value: `append` gives a new cache and leaves this one as it is."""

    ckv: Tensor  # [kv_len, kv_lora_rank], normalised
    kpe: Tensor  # [kv_len, qk_rope_head_dim], RoPE applied

    @classmethod
    def empty(cls, config: LayerConfig, device: torch.device | str = "cpu") -> LatentCache:
        widths = (config.kv_lora_rank, config.rope.dim)
        return cls(*(torch.empty(0, width, dtype=torch.float64, device=device) for width in widths))

    def append(self, ckv: Tensor, kpe: Tensor) -> LatentCache:
        return LatentCache(torch.cat([self.ckv, ckv]), torch.cat([self.kpe, kpe]))

    def __len__(self) -> int:
        return len(self.ckv)


@dataclass(frozen=True, eq=False)
class LayerOutput:
    hidden: Tensor  # [q_len, hidden_size] float64, before the residual is added
    lse: Tensor  # [q_len, num_heads] float64, natural log
    cache: LatentCache  # the given one and the new tokens


def load_weights(tensors: Mapping[str, Tensor], config: LayerConfig, prefix: str = "") -> LayerWeights:
    """The layer's weights from a checkpoint's tensors, converted to float64.

    tensors: by Hugging Face names, e.g. "model.layers.0.self_attn.kv_b_proj.weight"; any float dtype that stands for
    the values themselves.  prefix: what stands before "q_proj.weight", e.g. "model.layers.0.self_attn.".
    Raises ValueError naming each tensor that is missing, has another shape than the config gives, or stands under the
    prefix and would have to be ignored: a bias, the scales of a quantised checkpoint, an indexer.
    """
    shapes = {prefix + name: shape for name, shape in config.tensor_shapes().items()}
    problems = []
    for name, shape in shapes.items():
        if name not in tensors:
            problems.append(f"{name} is missing")
        elif tuple(tensors[name].shape) != shape:
            problems.append(f"{name} is {list(tensors[name].shape)}, the config gives {list(shape)}")
    # Tables of rotary frequencies, which some checkpoints carry, follow from the config.
    under_prefix = (name for name in tensors if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq"))
    problems += [f"{name} has no place in this layer" for name in under_prefix if name not in shapes]
    if problems:
        raise ValueError("; ".join(problems))

    def get(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"].detach().double()

    compressed = config.q_lora_rank is not None
    kv_b = get("kv_b_proj").view(config.num_heads, -1, config.kv_lora_rank)  # [num_heads, nope then v, kv_lora_rank]
    w_kc, w_vc = torch.split(kv_b, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return LayerWeights(
        q_a=QueryCompression(get("q_a_proj"), get("q_a_layernorm")) if compressed else None,
        q_proj=get("q_b_proj" if compressed else "q_proj"),
        kv_a_proj=get("kv_a_proj_with_mqa"),
        kv_a_layernorm=get("kv_a_layernorm"),
        w_kc=w_kc,
        w_vc=w_vc.transpose(1, 2),
        o_proj=get("o_proj"),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float64 (arXiv 1910.07467)."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def project_query(
    hidden: Tensor, positions: Tensor, weights: LayerWeights, config: LayerConfig
) -> tuple[Tensor, Tensor]:
    """The new tokens' queries in the non-absorbed form, in float64.

    hidden: [q_len, hidden_size], any float dtype.  positions: [q_len] int64.
    Returns q_nope [q_len, num_heads, qk_nope_head_dim] and q_pe [q_len, num_heads, qk_rope_head_dim], RoPE applied.
    """
    x = hidden.double()
    if weights.q_a is not None:
        x = rms_norm(x @ weights.q_a.q_a_proj.T, weights.q_a.q_a_layernorm, config.norm_eps)
    q = (x @ weights.q_proj.T).view(len(x), config.num_heads, config.qk_head_dim)
    q_nope, q_pe = torch.split(q, [config.qk_nope_head_dim, config.rope.dim], dim=-1)
    return q_nope, rotate(q_pe, positions, config.rope)


def project_latent(
    hidden: Tensor, positions: Tensor, weights: LayerWeights, config: LayerConfig
) -> tuple[Tensor, Tensor]:
    """What the cache holds of the new tokens, in float64.

    hidden: [q_len, hidden_size], any float dtype.  positions: [q_len] int64.
    Returns ckv [q_len, kv_lora_rank], normalised, and kpe [q_len, qk_rope_head_dim], RoPE applied.
    """
    latent, kpe = torch.split(hidden.double() @ weights.kv_a_proj.T, [config.kv_lora_rank, config.rope.dim], dim=-1)
    return rms_norm(latent, weights.kv_a_layernorm, config.norm_eps), rotate(kpe, positions, config.rope)


def attend_heads(
    q_nope: Tensor, q_pe: Tensor, cache: LatentCache, weights: LayerWeights, *, sm_scale: float, form: Form
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last q_len tokens of the cache, in float64.

    q_nope and q_pe: from `project_query`.  cache: up to and including these tokens.
    Returns out [q_len, num_heads, v_head_dim] and lse [q_len, num_heads], natural log.
    Raises ValueError for an unknown form.
    """
    if form == "absorbed":
        q_latent = torch.einsum("qhn,hnr->qhr", q_nope, weights.w_kc)
        attention = attend_absorbed(q_latent, q_pe, cache.ckv, cache.kpe, sm_scale=sm_scale, causal=True)
        return torch.einsum("qhr,hrv->qhv", attention.out, weights.w_vc), attention.lse
    if form == "mha":
        k, v = expand_kv(cache.ckv, cache.kpe, weights.w_kc, weights.w_vc)
        attention = attend_mha(torch.cat([q_nope, q_pe], dim=-1), k, v, sm_scale=sm_scale, causal=True)
        return attention.out, attention.lse
    raise ValueError(f"unknown form {form!r}, known: absorbed, mha")


def run_layer(
    hidden: Tensor,
    cache: LatentCache,
    weights: LayerWeights,
    config: LayerConfig,
    *,
    form: Form,
    positions: Tensor | None = None,
) -> LayerOutput:
    """The next q_len tokens of a sequence: prefill (empty cache), a further chunk, or decode (q_len 1).

    hidden: [q_len, hidden_size], any float dtype, the layer's normalised input.  cache: of the tokens before them.
    positions: [q_len] int64, where the tokens stand; None: right after the cache, counted from 0.
    Token t sees the cache and the new tokens up to itself.
    Raises ValueError for another hidden_size than the config's.
    """
    if hidden.dim() != 2 or hidden.shape[1] != config.hidden_size:
        raise ValueError(f"hidden is {list(hidden.shape)}, it must be [q_len, {config.hidden_size}]")
    if positions is None:
        positions = torch.arange(len(cache), len(cache) + len(hidden), device=hidden.device)
    cache = cache.append(*project_latent(hidden, positions, weights, config))
    q_nope, q_pe = project_query(hidden, positions, weights, config)
    heads, lse = attend_heads(q_nope, q_pe, cache, weights, sm_scale=config.sm_scale, form=form)
    return LayerOutput(heads.flatten(1) @ weights.o_proj.T, lse, cache)
