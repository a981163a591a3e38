"""The whole layer gives one answer: in both forms, however a sequence is cut into chunks, wherever it stands."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_verify.reference.layer import LatentCache, LayerConfig, load_weights, rms_norm, run_layer
from mla_verify.reference.rope import RopeConfig, YarnConfig

V2_YARN = YarnConfig(factor=40.0, mscale=0.707, mscale_all_dim=0.707)
REAL = LayerConfig(96, 3, q_lora_rank=48, rope=RopeConfig(64, yarn=YarnConfig(40.0, mscale_all_dim=1.0)))
SMALL = LayerConfig(
    20, 2, q_lora_rank=None, rope=RopeConfig(4, yarn=V2_YARN), kv_lora_rank=12, qk_nope_head_dim=6, v_head_dim=5
)
SMALL_LORA = LayerConfig(
    20, 2, q_lora_rank=7, rope=RopeConfig(4, style="half"), kv_lora_rank=12, qk_nope_head_dim=6, v_head_dim=5
)
CONFIGS = {"real": REAL, "small": SMALL, "small-q-lora": SMALL_LORA}
FORMS = ("absorbed", "mha")


def checkpoint(config: LayerConfig, seed: int = 0, prefix: str = "") -> dict[str, torch.Tensor]:
    """Random tensors by their checkpoint names; queries large enough for a softmax that is not flat."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        tensor = torch.randn(shape, generator=g, dtype=torch.float64)
        if "layernorm" in name:
            tensor = 1 + 0.3 * tensor
        else:
            tensor *= (3 if name.startswith("q_") else 1) * shape[1] ** -0.5
        tensors[prefix + name] = tensor
    return tensors


def hidden_states(config: LayerConfig, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(config, hidden, form, *, cache=None, positions=None, seed=0):
    weights = load_weights(checkpoint(config, seed), config)
    cache = LatentCache.empty(config) if cache is None else cache
    return run_layer(hidden, cache, weights, config, form=form, positions=positions)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype == torch.float64
    assert float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("tokens", [1, 2, 17, 65])
def test_absorbed_equals_non_absorbed_from_hidden_state_to_output(config, tokens):
    hidden = hidden_states(config, tokens)
    absorbed, mha = (run(config, hidden, form) for form in FORMS)
    assert_near(absorbed.hidden, mha.hidden, 1e-12)
    assert_near(absorbed.lse, mha.lse, 1e-12)
    assert torch.equal(absorbed.cache.ckv, mha.cache.ckv) and torch.equal(absorbed.cache.kpe, mha.cache.kpe)


@settings(max_examples=40, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 6), st.sampled_from(FORMS)), min_size=1, max_size=6),
    config=st.sampled_from([SMALL, SMALL_LORA]),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_prefill_chunks_and_decode_steps_equals_one_prefill(chunks, config, seed):
    hidden = hidden_states(config, sum(n for n, _ in chunks), seed)
    whole = run(config, hidden, "mha", seed=seed)
    cache, start = LatentCache.empty(config), 0
    for n, form in chunks:
        step = run(config, hidden[start : start + n], form, cache=cache, seed=seed)
        assert_near(step.hidden, whole.hidden[start : start + n], 1e-12)
        cache, start = step.cache, start + n
    assert_near(cache.ckv, whole.cache.ckv, 1e-12)
    assert_near(cache.kpe, whole.cache.kpe, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_decode_far_beyond_the_original_length_equals_prefill_there(form):
    hidden, positions = hidden_states(REAL, 12), torch.arange(30_000, 30_012)
    whole = run(REAL, hidden, form, positions=positions)
    cache = LatentCache.empty(REAL)
    for t in range(12):
        step = run(REAL, hidden[t : t + 1], form, cache=cache, positions=positions[t : t + 1])
        assert_near(step.hidden, whole.hidden[t : t + 1], 1e-12)
        cache = step.cache


def test_only_the_distance_between_tokens_matters_and_it_does_matter():
    hidden, positions = hidden_states(REAL, 9), torch.arange(9)
    here = run(REAL, hidden, "absorbed", positions=positions)
    assert torch.equal(here.hidden, run(REAL, hidden, "absorbed").hidden)  # the default counts from the cache's end
    there = run(REAL, hidden, "absorbed", positions=positions + 100_000)
    assert_near(there.hidden, here.hidden, 1e-9)  # an angle of 1e5 radians is rounded to 7e-12
    stretched = run(REAL, hidden, "absorbed", positions=positions * 7)
    assert float((stretched.hidden - here.hidden).abs().max()) > 1e-2 * float(here.hidden.abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_a_token_sees_itself_and_the_past_and_nothing_later(form):
    hidden = hidden_states(SMALL, 8)
    before = run(SMALL, hidden, form).hidden
    hidden[4] += 1.0
    changed = (run(SMALL, hidden, form).hidden - before).abs().amax(-1)
    assert float(changed[:4].max()) < 1e-14 and float(changed[4:].min()) > 1e-4


def test_the_cache_is_a_value_and_a_step_leaves_the_given_one_as_it_was():
    first = run(SMALL, hidden_states(SMALL, 3), "absorbed")
    ckv, kpe = first.cache.ckv.clone(), first.cache.kpe.clone()
    branches = [run(SMALL, hidden_states(SMALL, 2, seed), "absorbed", cache=first.cache).cache for seed in (5, 6)]
    assert torch.equal(first.cache.ckv, ckv) and torch.equal(first.cache.kpe, kpe)
    assert [len(b) for b in branches] == [5, 5] and len(first.cache) == 3
    assert not torch.equal(branches[0].ckv, branches[1].ckv)


def test_the_latent_is_normalised_before_it_is_cached_and_k_pe_is_not():
    cache = run(SMALL, hidden_states(SMALL, 5), "absorbed").cache
    hidden, tensors = hidden_states(SMALL, 5), checkpoint(SMALL)
    raw = hidden @ tensors["kv_a_proj_with_mqa.weight"].T
    rms = (cache.ckv / tensors["kv_a_layernorm.weight"]).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), rtol=1e-4, atol=0)
    torch.testing.assert_close(cache.kpe.norm(dim=-1), raw[:, 12:].norm(dim=-1), rtol=1e-13, atol=0)
    # eps stands under the root: the norm of a tiny vector x is x / sqrt(eps).
    torch.testing.assert_close(rms_norm(torch.full((4,), 1e-9), torch.ones(4), 1e-6), torch.full((4,), 1e-6).double())


def test_low_precision_weights_and_input_are_computed_in_float64():
    low = {name: t.bfloat16() for name, t in checkpoint(SMALL_LORA).items()}
    weights = load_weights(low, SMALL_LORA)
    hidden = hidden_states(SMALL_LORA, 6).bfloat16()
    result = run_layer(hidden, LatentCache.empty(SMALL_LORA), weights, SMALL_LORA, form="absorbed")
    wide_weights = load_weights({name: t.double() for name, t in low.items()}, SMALL_LORA)
    wide = run_layer(hidden.double(), LatentCache.empty(SMALL_LORA), wide_weights, SMALL_LORA, form="absorbed")
    assert torch.equal(result.hidden, wide.hidden)


def test_a_prefix_picks_one_layer_of_a_whole_checkpoint():
    prefix = "model.layers.3.self_attn."
    tensors = checkpoint(SMALL, seed=3, prefix=prefix) | checkpoint(SMALL, seed=4, prefix="model.layers.4.self_attn.")
    tensors |= {"lm_head.weight": torch.zeros(1), f"{prefix}rotary_emb.inv_freq": torch.zeros(2)}
    weights = load_weights(tensors, SMALL, prefix)
    assert torch.equal(weights.o_proj, tensors[f"{prefix}o_proj.weight"])
    kv_b = tensors[f"{prefix}kv_b_proj.weight"]  # head 0's nope rows, head 0's value rows, head 1's nope rows, ...
    assert torch.equal(weights.w_kc[1], kv_b[11:17]) and torch.equal(weights.w_vc[1], kv_b[17:22].T)


@pytest.mark.parametrize("config", [SMALL, SMALL_LORA], ids=["q_proj", "q_lora"])
def test_loading_names_every_tensor_that_is_missing_misshapen_or_would_be_ignored(config):
    for name in checkpoint(config):
        tensors = checkpoint(config)
        del tensors[name]
        with pytest.raises(ValueError, match=f"{name} is missing"):
            load_weights(tensors, config)
    tensors = checkpoint(config)
    tensors["o_proj.weight"] = tensors["o_proj.weight"].T
    tensors["kv_a_proj_with_mqa.bias"] = torch.zeros(16)
    tensors["kv_b_proj.weight_scale_inv"] = torch.ones(1)
    with pytest.raises(ValueError, match="no place") as error:
        load_weights(tensors, config)
    assert str(error.value).split("; ") == [
        "o_proj.weight is [10, 20], the config gives [20, 10]",
        "kv_a_proj_with_mqa.bias has no place in this layer",
        "kv_b_proj.weight_scale_inv has no place in this layer",
    ]


def test_a_checkpoint_with_the_other_kind_of_query_is_refused():
    with pytest.raises(ValueError, match=r"q_proj.weight is missing; .*q_b_proj.weight has no place"):
        load_weights(checkpoint(SMALL_LORA), SMALL)


def test_an_unknown_form_and_a_wrong_hidden_size_are_errors():
    with pytest.raises(ValueError, match="unknown form 'absorb'"):
        run(SMALL, hidden_states(SMALL, 2), "absorb")
    with pytest.raises(ValueError, match=r"hidden is \[2, 96\], it must be \[q_len, 20\]"):
        run(SMALL, hidden_states(REAL, 2), "mha")
