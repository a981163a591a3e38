"""The layer is DeepSeek's: it agrees with Hugging Face transformers' modules, which share no code with it.

transformers keeps its norms and rotary tables in float32 whatever the weights are. So there are two comparisons: with
transformers as it is, to a bound that float32 allows, and with its own code run in float64 throughout, to 1e-10.

Where transformers 5.24 and DeepSeek's published code part ways:

- DeepSeek-V3's module puts the rotated pairs in half-split order (all first elements, then all second), in q and k
  alike, as modeling_deepseek.py does. Scores do not change, but its cached k_pe is a permutation of what
  DeepSeek's inference/model.py and every serving engine's cache hold. DeepSeek-V2's module keeps the pairs in place.
- A config with mscale and without mscale_all_dim gets the amplitude 0.1 ln(factor) + 1 and its mscale is ignored;
  in DeepSeek's code it is 0.1 mscale ln(factor) + 1. No published DeepSeek model has such a config.
- Both take eps 1e-6 in the layer's two norms, whatever rms_norm_eps says, and both put mscale^2 into the softmax
  scale only for mscale_all_dim: no difference.
"""

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mla_verify.reference.layer import LatentCache, LayerConfig, load_weights, run_layer
from mla_verify.reference.rope import RopeConfig, YarnConfig

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the transformers whose attention this calls, 5.24, needs Python 3.11"
)

HIDDEN, HEADS = 96, 3  # few and narrow; head dimensions are the real ones
ORIGINAL_LENGTH = 4096
CHUNKS = (13, 1, 4, 1)  # prefill, decode, a chunk on top of a cache, decode


# Largest errors of transformers as it is, relative to the largest value, over all cases below (torch 2.13, x86-64):
#     output   from position 0: 2.7e-7 to 4.2e-7      from position 20,000: 2.0e-4 to 5.4e-4
#     ckv      1.2e-7                                 1.2e-7
#     kpe      1.6e-7 to 4.8e-7                       3.0e-4 to 1.0e-3
# Near: float32 has a unit roundoff of 6e-8. Far: its neighbours at 20,000 are 2e-3 apart, so angles are off by 1e-3.
LIMITS = {0: {"hidden": 1e-6, "ckv": 3e-7, "kpe": 1e-6}, 20_000: {"hidden": 1e-3, "ckv": 3e-7, "kpe": 2e-3}}


def layer(q_lora_rank: int | None, yarn: YarnConfig | None, **rope) -> LayerConfig:
    return LayerConfig(HIDDEN, HEADS, q_lora_rank, RopeConfig(yarn=yarn, **rope))


# Which of the two modules, and what of.
CASES = {
    "v2-lite": ("v2", layer(None, YarnConfig(40.0, mscale=0.707, mscale_all_dim=0.707))),
    "v2-q-lora": ("v2", layer(48, YarnConfig(40.0, mscale=0.707, mscale_all_dim=0.707))),
    "v2-plain-rope": ("v2", layer(48, None)),
    # cos and sin grow by 1.086 here; by nothing in every published model.
    "v2-unequal-mscale": ("v2", layer(None, YarnConfig(40.0, mscale=1.0, mscale_all_dim=0.707))),
    "v3": ("v3", layer(48, YarnConfig(40.0, mscale=1.0, mscale_all_dim=1.0))),
    "v3-q-proj": ("v3", layer(None, YarnConfig(40.0, mscale=1.0, mscale_all_dim=1.0))),
    "v3-half-split": ("v3", layer(48, YarnConfig(40.0, mscale_all_dim=1.0), style="half")),
    "kimi-k2": ("v3", layer(48, YarnConfig(32.0, beta_fast=1.0, mscale_all_dim=1.0), theta=50000.0)),
}


def their_modules(version):
    # Imported here: 5 seconds that no other test should pay.
    from transformers.models.deepseek_v2 import configuration_deepseek_v2 as config_v2
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import configuration_deepseek_v3 as config_v3
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    if version == "v2":
        return config_v2.DeepseekV2Config, v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding
    return config_v3.DeepseekV3Config, v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding


def rope_parameters(rope: RopeConfig) -> dict[str, object]:
    if rope.yarn is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    yarn = {name: getattr(rope.yarn, name) for name in YarnConfig.__dataclass_fields__}
    return {"rope_type": "yarn", "rope_theta": rope.theta, **yarn}


class Theirs:
    """One attention module of transformers with random float64 weights, and its rotary table and cache."""

    def __init__(self, version: str, config: LayerConfig) -> None:
        from transformers import DynamicCache

        config_class, attention_class, rotary_class = their_modules(version)
        hf_config = config_class(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.rope.dim,
            v_head_dim=config.v_head_dim,
            max_position_embeddings=int(ORIGINAL_LENGTH * (config.rope.yarn.factor if config.rope.yarn else 1)),
            rope_parameters=rope_parameters(config.rope),
            attn_implementation="sdpa",
            **({"rope_interleave": config.rope.style == "interleaved"} if version == "v3" else {}),
        )
        self.attention = attention_class(hf_config, layer_idx=0).double().eval()
        self.rotary = rotary_class(hf_config)
        self.cache = DynamicCache()
        generator = torch.Generator().manual_seed(0)
        for name, weight in self.attention.named_parameters():
            weight.data.normal_(generator=generator)
            if "layernorm" in name:
                weight.data.mul_(0.3).add_(1.0)
            else:
                # Queries large enough for a softmax that is not flat: a wrong scale or rotation must show.
                weight.data.mul_(weight.shape[1] ** -0.5 * (4 if name.startswith("q_") else 1))

    def step(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[q_len, hidden_size]: the output for the next tokens, whose keys join the cache."""
        past = self.cache.get_seq_length()
        # A prefill uses their own causality. On top of a cache the model would pass a mask: without one, their sdpa
        # aligns the causal triangle at the top left.
        mask = torch.ones(1, 1, len(hidden), past + len(hidden), dtype=torch.bool).tril(past) if past else None
        with torch.no_grad():
            return self.attention(
                hidden[None],
                position_embeddings=self.rotary(hidden[None], positions[None]),
                attention_mask=mask,
                cache=self.cache,
            )[0][0]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype == torch.float64
    return float((actual - expected).abs().max() / expected.abs().max())


@contextmanager
def transformers_in_float64():
    """Their own code with every float32 in it read as float64, so that nothing of it has to be written again."""
    from transformers import modeling_rope_utils
    from transformers.models.deepseek_v2 import modeling_deepseek_v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    wide = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    wide.float = wide.float32 = torch.float64
    with pytest.MonkeyPatch.context() as patch:
        for module in (modeling_rope_utils, modeling_deepseek_v2, modeling_deepseek_v3):
            patch.setattr(module, "torch", wide)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def compare(version, config, start, *, ours: LayerConfig | None = None, wide: bool = False) -> dict[str, float]:
    """Worst errors of both our forms against theirs over CHUNKS, from position `start`.

    ours: another config for our side.  wide: run their side, and only theirs, in float64.
    """
    hidden = torch.randn(sum(CHUNKS), HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    positions = torch.arange(start, start + len(hidden))
    chunks = list(zip(hidden.split(CHUNKS), positions.split(CHUNKS), strict=True))
    with transformers_in_float64() if wide else nullcontext():
        theirs = Theirs(version, config)
        outputs = [theirs.step(*chunk) for chunk in chunks]

    config = ours or config
    weights = load_weights(theirs.attention.state_dict(), config)
    caches = {form: LatentCache.empty(config) for form in ("absorbed", "mha")}
    errors = []
    for (tokens, where), output in zip(chunks, outputs, strict=True):
        for form, cache in caches.items():
            step = run_layer(tokens, cache, weights, config, form=form, positions=where)
            errors.append(relative_error(output, step.hidden))
            caches[form] = step.cache
    cached, expected = theirs.cache.layers[0], caches["absorbed"]
    kpe = expected.kpe
    if version == "v3" and config.rope.style == "interleaved":
        kpe = torch.cat([kpe[:, 0::2], kpe[:, 1::2]], dim=-1)
    return {
        "hidden": max(errors),
        "ckv": relative_error(cached.keys[0, 0], expected.ckv),
        "kpe": relative_error(cached.values[0, 0], kpe),
    }


@pytest.mark.parametrize("start", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_layer_agrees_with_transformers_as_it_is_as_far_as_its_float32_goes(name, start):
    errors = compare(*CASES[name], start)
    assert all(errors[what] <= limit for what, limit in LIMITS[start].items()), errors


@pytest.mark.parametrize("start", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_layer_agrees_with_transformers_in_float64_to_1e_10(name, start):
    # Measured: 5e-15 near, 1.6e-12 from position 20,000 on, where float64 angles are 4e-12 apart.
    errors = compare(*CASES[name], start, wide=True)
    assert max(errors.values()) <= 1e-10, errors


def with_yarn(config: LayerConfig, **changes) -> LayerConfig:
    return replace(config, rope=replace(config.rope, yarn=replace(config.rope.yarn, **changes)))


V2_LITE, UNEQUAL, V3 = (CASES[name][1] for name in ("v2-lite", "v2-unequal-mscale", "v3"))
MISTAKES = {
    "softmax scale without mscale^2": (V3, with_yarn(V3, mscale=0.0, mscale_all_dim=0.0)),
    "mscale where mscale_all_dim belongs": (UNEQUAL, with_yarn(UNEQUAL, mscale_all_dim=1.0)),
    "amplitude 1.26, without its denominator": (V2_LITE, with_yarn(V2_LITE, mscale=1.6)),
    "pairs taken from the two halves": (V3, replace(V3, rope=replace(V3.rope, style="half"))),
    "plain frequencies": (V3, with_yarn(V3, original_max_position_embeddings=10**9)),
    "ramp from frequency 12 instead of 10": (V3, with_yarn(V3, beta_fast=16.0)),
    "eps of the model's other norms": (V3, replace(V3, norm_eps=1e-5)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_float32_bound_rejects_a_layer_with_a_known_mistake(mistake):
    theirs, ours = MISTAKES[mistake]
    version = "v3" if theirs is V3 else "v2"
    assert compare(version, theirs, 0, ours=ours)["hidden"] > 2 * LIMITS[0]["hidden"]
