"""Form layer: one set of weights, absorbed and expanded, against one float64 truth, and what goes wrong around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_verify import layer_suites
from mla_verify.cases import ATTENTION_PHASES, REGIMES, CaseSpec
from mla_verify.errors import UsageError
from mla_verify.expected import expect
from mla_verify.inputs import make_inputs
from mla_verify.kernels import load_kernel
from mla_verify.kernels.contract import Contract, KernelBase, RoundingFacts, facts_on
from mla_verify.kernels.layers import AbsorbedLayer, ExpandedLayer, product
from mla_verify.layer_expected import read_request
from mla_verify.layer_noise import weights_of
from mla_verify.reference.attention import attend_absorbed, attend_mha
from mla_verify.regimes import REGIME_TABLE
from mla_verify.suites import suite_cases
from mla_verify.tensors import AbsorbedInputs, LayerInputs, MHAInputs, MLAOutput, output_buffers
from mla_verify.vacuity import fault_sizes, unseen_faults
from tests.honest_layers import EMULATED, WAYS, Inner, failed, layer, run_layer
from tests.kernels_helper import cases, verify

PREFIX = "prefix-layer-h8-q9.kv100+q3.kv65-p16-{}-{}-s0"


def inputs_of(case: str) -> LayerInputs:
    inputs = make_inputs(CaseSpec.parse(case))
    assert isinstance(inputs, LayerInputs)
    return inputs


# Truth


@pytest.mark.parametrize("regime", REGIMES)
def test_absorbed_and_expanded_are_one_truth(regime: str) -> None:
    for b, case in enumerate([PREFIX.format("bf16", regime)] * 2):
        r = read_request(inputs_of(case), b)
        latent = attend_absorbed(r.q_latent, r.q_pe, r.ckv, r.kpe, sm_scale=r.sm_scale, causal=r.causal)
        k, v = r.keys_and_values
        mha = attend_mha(r.expanded.q[0], k, v, sm_scale=r.sm_scale, causal=r.causal)
        for out, lse in (
            (torch.einsum("qhr,hrv->qhv", latent.out, r.w_vc), latent.lse),
            (r.absorbed.attend().out, r.absorbed.attend().lse),
        ):
            assert float((out - mha.out).abs().max()) < 1e-11 * float(mha.out.abs().max())
            assert float((lse - mha.lse).abs().max()) < 1e-11 * max(1.0, float(mha.lse.abs().max()))


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "w_kc", "w_vc", "ckv_cache", "kpe_cache"])
def test_inputs_that_are_not_finite_are_refused_by_name(name: str) -> None:
    inputs = inputs_of("decode-layer-h4-q1.kv64-p64-bf16-normal-s0")
    tensor = getattr(inputs, name).clone()
    tensor[(int(inputs.page_table[0, 0]), 3) if name.endswith("cache") else 0] = float("nan")
    with pytest.raises(UsageError) as error:
        expect(replace(inputs, **{name: tensor}), [RoundingFacts("bf16", layer="absorbed")])
    assert error.value.message == f"{name} holds NaN or infinity where request 0 reads it, so that no output is right"


# Inputs


def test_weights_give_keys_and_values_of_the_size_of_the_latent_and_queries_to_match() -> None:
    inputs = inputs_of("prefix-layer-h4-q33.kv300-p16-bf16-normal-s0")
    r = read_request(inputs, 0)
    k, v = r.keys_and_values
    assert abs(float(k[..., :128].std()) - 1) < 0.05 and abs(float(v.std()) - 1) < 0.05
    assert abs(float(r.q_latent.std()) - 0.5) < 0.05  # 128 of 512 dims
    assert inputs.w_kc.shape == (4, 128, 512) and inputs.w_vc.shape == (4, 512, 128)
    assert {t.dtype for name, t in inputs.named_tensors().items() if t.is_floating_point()} == {torch.bfloat16}
    assert not torch.equal(inputs.w_kc[0], inputs.w_kc[1])


def test_needles_are_aimed_through_the_weights() -> None:
    r = read_request(inputs_of("decode-layer-h8-q1.kv257-p16-bf16-needle-s0"), 0)
    attention = r.expanded.attend()
    heaviest = torch.exp(attention.max_score - attention.lse)
    assert float(heaviest.min()) > 0.15 and float(heaviest.max()) < 0.999
    # Another head's weights lose every needle.
    lost = replace(r, w_kc=r.w_kc.roll(1, 0)).expanded.attend()
    assert float(torch.exp(lost.max_score - lost.lse).max()) < 0.15


def test_parts_of_unequal_mass_and_a_large_channel_come_from_the_latent_that_both_ways_share() -> None:
    inputs = inputs_of("prefix-layer-h8-q3.kv300-p16-bf16-unequal-s0")
    r = read_request(inputs, 0)
    mass = [part.sum(-1) for part in weights_of(r, r.expanded.attend()).tensor_split(4, dim=-1)]
    assert float((mass[3] / mass[0]).min()) > 4 and float((mass[0] + mass[1]).min()) > 1e-3
    v = r.keys_and_values[1]
    assert float((v[225:].mean(0) - v[:225].mean(0)).abs().mean()) > 0.2  # so that their weights show
    ckv = read_request(inputs_of("prefix-layer-h8-q3.kv300-p16-bf16-channel-s0"), 0).ckv
    assert (ckv.mean(0) > 90).sum() == 1


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_shows_the_faults_that_it_is_there_to_show(regime: str, dtype: str) -> None:
    inputs = inputs_of(f"decode-layer-h8-q1.kv300-p64-{dtype}-{regime}-s0")
    facts = [
        RoundingFacts(dtype, p_dtype=dtype, layer="absorbed"),
        RoundingFacts(dtype, p_dtype=dtype, layer="expanded"),
    ]
    expected = expect(inputs, facts)
    sizes = fault_sizes(inputs, expected, REGIME_TABLE[regime].shows)
    assert set(sizes) == set(REGIME_TABLE[regime].shows)
    assert [unseen_faults(sizes, expected, f) for f in facts] == [[], []]


def test_unreferenced_slots_are_poisoned_and_never_read() -> None:
    for name in ("torch-layer-absorbed", "torch-layer-expanded"):
        inputs = inputs_of(PREFIX.format("bf16", "normal"))
        assert bool(inputs.ckv_cache.isnan().any())
        out = load_kernel(name).run(inputs, output_buffers(inputs, torch.bfloat16).output).out
        assert bool(out.isfinite().all())


# Composites


class Spy(KernelBase):
    """Keeps what it was given, and returns a constant."""

    name = "spy"

    def __init__(self, **contract: object) -> None:
        self.contract = Contract(**contract)  # type: ignore[arg-type]
        self.given: AbsorbedInputs | MHAInputs | None = None

    def run(self, inputs: AbsorbedInputs | MHAInputs, out: MLAOutput) -> MLAOutput:
        self.given = inputs
        assert bool(out.out.isnan().all())
        return MLAOutput(out.out.fill_(1.0), None)

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        return f"{spec.form} {spec.page_size} on {device}" if spec.num_heads == 7 else None


def test_an_absorbed_kernel_gets_the_query_as_the_product_leaves_it_and_the_cache_as_it_is() -> None:
    inputs, spy = inputs_of(PREFIX.format("bf16", "normal")), Spy()
    out = AbsorbedLayer("layer", spy).run(inputs, output_buffers(inputs, torch.bfloat16).output).out
    given = spy.given
    assert isinstance(given, AbsorbedInputs)
    assert given.q_nope.shape == (12, 8, 512) and given.q_nope.stride() == (512, 12 * 512, 1)
    assert given.ckv_cache is inputs.ckv_cache and given.kpe_cache is inputs.kpe_cache and given.q_pe is inputs.q_pe
    expected = torch.einsum("qhn,hnr->qhr", inputs.q_nope.double(), inputs.w_kc.double())
    assert float((given.q_nope.double() - expected).abs().max()) < 2**-7
    # The latent output of ones, through w_vc.
    torch.testing.assert_close(out.double(), inputs.w_vc.double().sum(1).expand(12, -1, -1), rtol=2**-8, atol=1e-4)


def test_an_expanded_kernel_gets_keys_side_by_side_and_values_as_views_of_one_product() -> None:
    inputs, spy = inputs_of(PREFIX.format("bf16", "normal")), Spy(form="mha")
    ExpandedLayer("layer", spy).run(inputs, output_buffers(inputs, torch.bfloat16).output)
    given = spy.given
    assert isinstance(given, MHAInputs)
    assert given.kv_indptr.tolist() == [0, 100, 165] and given.qk_dims == (128, 64)
    assert given.v.stride() == (8 * 256, 256, 1)
    k, v = (torch.cat(x) for x in zip(*(read_request(inputs, b).keys_and_values for b in range(2)), strict=True))
    assert float((given.k.double() - k).abs().max()) < 2**-6 and float((given.v.double() - v).abs().max()) < 2**-6
    assert torch.equal(given.k[..., 128:].double(), k[..., 128:])  # the rope part is copied


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_that_takes_no_views_gets_none(way: str) -> None:
    inputs = inputs_of(PREFIX.format("bf16", "normal"))
    spy = Spy(form="absorbed" if way == "absorbed" else "mha", strides="contiguous")
    layer(way, spy).run(inputs, output_buffers(inputs, torch.bfloat16).output)
    assert spy.given is not None
    assert all(tensor.is_contiguous() for tensor in spy.given.named_tensors().values())


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_takes_the_cases_that_its_kernel_takes(way: str) -> None:
    form = "absorbed" if way == "absorbed" else "mha"
    spy = Spy(form=form, phases=("decode", "mixed"), page_sizes=(64,), num_heads=(7, 8), empty_out="any")
    kernel = layer(way, spy)
    assert kernel.contract.phases == ("decode", "mixed") and kernel.contract.empty_out == "any"
    assert kernel.contract.dtypes == ("fp16", "bf16")
    spec = CaseSpec.parse("decode-layer-h8-q1.kv64-p64-bf16-normal-s0")
    assert kernel.why_not(spec, "cuda") is None
    assert kernel.why_not(replace(spec, num_heads=7), "cuda") == f"{form} {64 if way == 'absorbed' else 0} on cuda"
    assert "9 heads" in str(kernel.contract.why_not(replace(spec, num_heads=9)))
    small = kernel.contract.why_not(replace(spec, page_size=16))
    assert small == ("page size 16 is not among 64" if way == "absorbed" else None)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_declares_its_kernels_roundings_and_its_own(way: str) -> None:
    inner = Inner(way, EMULATED[-1])
    facts, theirs = layer(way, inner).contract.facts("bf16"), inner.contract.facts("bf16")
    assert facts.layer == way and facts.layer_tensor_core_k == 16
    assert facts.sources[: len(theirs.sources)] == theirs.sources and len(facts.sources) > len(theirs.sources)
    assert replace(facts, layer=None, layer_tensor_core_k=None, sources=theirs.sources) == theirs
    assert facts_on(layer(way, inner).contract, "bf16", "cpu").layer_tensor_core_k is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_rounded_once_from_fp32(dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 5, 512).to(dtype), torch.randn(3, 512, 7).to(dtype)
    exact = a.double() @ b.double()
    assert float(((product(a, b).double() - exact).abs() / exact.abs().clamp_min(1)).max()) < torch.finfo(dtype).eps


class FakeMatmul:
    """The settings of torch.backends.cuda.matmul, without and with the flag of split-K."""

    def __init__(self, with_split_k: bool) -> None:
        for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
            self.__dict__[name] = True
            if with_split_k:
                self.__dict__[f"{name}_split_k"] = False

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, tuple):
            self.__dict__[name], self.__dict__[f"{name}_split_k"] = value
        else:
            self.__dict__[name] = value


@pytest.mark.parametrize("with_split_k", [False, True])
def test_partial_sums_in_16_bits_are_off_during_a_product_and_as_before_after_it(
    with_split_k: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mla_verify.kernels.layers import _reductions_in_fp32

    fake = FakeMatmul(with_split_k)
    before = dict(vars(fake))
    monkeypatch.setattr(torch.backends.cuda, "matmul", fake)

    def fails() -> None:
        with _reductions_in_fp32():
            assert [v for name, v in vars(fake).items() if not name.endswith("split_k")] == [False, False]
            assert [v for name, v in vars(fake).items() if name.endswith("split_k")] == [False] * (2 * with_split_k)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fails()
    assert vars(fake) == before


# Faults


def _other_head(name: str) -> Callable[[LayerInputs], LayerInputs]:
    return lambda inputs: replace(inputs, **{name: getattr(inputs, name).roll(1, 0)})


def _transposed(name: str) -> Callable[[LayerInputs], LayerInputs]:
    def change(inputs: LayerInputs) -> LayerInputs:
        w = getattr(inputs, name)
        return replace(inputs, **{name: w.reshape(len(w), w.shape[2], w.shape[1]).transpose(1, 2).contiguous()})

    return change


def _scale(scale: float) -> Callable[[LayerInputs], LayerInputs]:
    return lambda inputs: replace(inputs, sm_scale=scale)


FAULTS: dict[str, Callable[[LayerInputs], LayerInputs]] = {
    "w_kc of another head": _other_head("w_kc"),
    "w_vc of another head": _other_head("w_vc"),
    "w_kc as its transpose lies": _transposed("w_kc"),
    "w_vc as its transpose lies": _transposed("w_vc"),
    "scale of 128 dims": _scale(128**-0.5),
    "scale of 192 dims": _scale(192**-0.5),
    "scale of 576 dims": _scale(576**-0.5),
    "scale off by 0.3 %": _scale(0.1011962890625 * 1.003),
    "no rope part": lambda inputs: replace(inputs, q_pe=torch.zeros_like(inputs.q_pe)),
    "halves of q_pe swapped": lambda inputs: replace(inputs, q_pe=inputs.q_pe.roll(32, -1)),
    "one key less": lambda inputs: replace(inputs, kv_lens=inputs.kv_lens - 1),
    "not causal": lambda inputs: replace(inputs, causal=False),
}


def judged(way: str, dtype: str, regime: str, change: Callable[[LayerInputs], LayerInputs]) -> set[str]:
    """The checks that fail for a kernel that works on changed inputs."""
    honest = run_layer(PREFIX.format(dtype, regime), way, EMULATED[1])
    assert not failed(honest.comparisons)
    faulty = layer(way, Inner(way, EMULATED[1]))
    buffers = output_buffers(honest.inputs, honest.inputs.q_nope.dtype).output
    return honest.judged(faulty.run(change(honest.inputs), buffers))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_the_weights_is_rejected_by_its_output_alone(fault: str, way: str) -> None:
    found = judged(way, "bf16", "normal", FAULTS[fault])
    assert any(check.startswith("out ") for check in found), found


class CoarseKeys(ExpandedLayer):
    """Stores k_nope as if its cache were FP8."""

    def expand(self, inputs: LayerInputs) -> MHAInputs:
        mha = super().expand(inputs)
        k = mha.k.clone()
        k[..., :128] = k[..., :128].to(torch.float8_e4m3fn).to(k.dtype)
        return replace(mha, k=k)


class Rounded(Inner):
    """Stores its output a second time, in a format of its own."""

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:  # type: ignore[override]
        done = super().run(inputs, out)
        return replace(done, out=self.store(done.out))

    def store(self, out: Tensor) -> Tensor:
        return ((out.float() / 3).to(out.dtype).float() * 3).to(out.dtype)


class CoarseOutput(Rounded):
    def store(self, out: Tensor) -> Tensor:
        return out.bfloat16().to(out.dtype)


@pytest.mark.parametrize(
    ("dtype", "regime", "way", "kernel"),
    [
        ("bf16", "normal", "expanded", CoarseKeys("coarse", Inner("expanded", EMULATED[0]))),
        ("fp16", "uniform", "absorbed", AbsorbedLayer("twice", Rounded("absorbed", EMULATED[0]))),
        ("bf16", "uniform", "absorbed", AbsorbedLayer("twice", Rounded("absorbed", EMULATED[0]))),
        ("fp16", "normal", "absorbed", AbsorbedLayer("coarse", CoarseOutput("absorbed", EMULATED[0]))),
    ],
    ids=["keys in FP8", "output stored twice in fp16", "output stored twice in bf16", "output stored in bf16"],
)
def test_a_rounding_that_is_not_declared_is_rejected(
    dtype: str, regime: str, way: str, kernel: AbsorbedLayer | ExpandedLayer
) -> None:
    honest = run_layer(f"prefix-layer-h8-q33.kv100-p16-{dtype}-{regime}-s0", way, EMULATED[0])
    assert not failed(honest.comparisons)
    buffers = output_buffers(honest.inputs, honest.inputs.q_nope.dtype).output
    assert "out rms_z" in honest.judged(kernel.run(honest.inputs, buffers))


# The product


def test_both_ways_of_one_library_pass_the_smoke_cases_and_a_wrong_weight_fails(tmp_path: Path) -> None:
    ids = [case.spec.id for case in suite_cases("smoke") if case.spec.form == "layer"]
    kernels = ("--kernel", "torch-layer-absorbed", "--kernel", "torch-layer-expanded")
    run = verify(tmp_path, *kernels, *cases(*ids))
    assert run.exit_code == 0 and len(run.report.results) == 2 * len(ids) == 18
    file = tmp_path / "wrong.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from mla_verify.kernels import mla_kernel\n"
        "from mla_verify.kernels.layers import torch_layer_absorbed\n"
        "kernel = torch_layer_absorbed()\n"
        "@mla_kernel(kernel.contract)\n"
        "def wrong(inputs, out):\n"
        "    return kernel.run(replace(inputs, w_vc=inputs.w_vc.roll(1, 0)), out)\n"
    )
    run = verify(tmp_path, "--kernel", f"{file}:wrong", *cases(ids[0]))
    assert run.exit_code == 1 and "out: " in run.only.reason


def test_standard_has_fifty_layers_in_each_16_bit_dtype_over_phases_heads_and_pages() -> None:
    templates = [template for template, _, _ in layer_suites.standard()]
    assert len(set(templates)) == len(templates) >= 50
    for dtype in ("fp16", "bf16"):
        specs = [s for case in suite_cases("standard") if (s := case.spec).form == "layer" and s.dtype == dtype]
        assert {s.phase for s in specs} == set(ATTENTION_PHASES)
        assert {s.num_heads for s in specs} == {8, 16, 128} and {s.page_size for s in specs} == {1, 16, 64}
        assert {s.regime for s in specs} == set(REGIMES)
        elements = [s.num_q_tokens * s.num_heads for s in specs]
        assert max(elements) < sum(elements) / 10
        # 2^17 products of the reference for each: seconds on a CPU, and nothing on a GPU.
        assert max(s.num_heads * sum(r.q_len * r.kv_len for r in s.requests) for s in specs) < 250_000
