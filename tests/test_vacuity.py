"""A case that cannot tell is refused: a fault is seen where its regime shows it, unseen where it changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_verify.cases import REGIMES, CaseSpec
from mla_verify.expected import expect
from mla_verify.formats import DTYPES
from mla_verify.inputs import make_inputs
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.regimes import REGIME_TABLE, Regime
from mla_verify.tensors import AbsorbedInputs, MLAInputs
from mla_verify.vacuity import FAULTS, fault_sizes, unseen_faults
from tests.cli_helper import invoke

FORMS = ("decode-absorbed-h8-q1.kv700-p64-{}-{}-s0", "decode-mha-h8-q1.kv700-ragged-{}-{}-s0")


def unseen(inputs: MLAInputs, faults: tuple[str, ...], dtype: str) -> list[str]:
    facts = RoundingFacts(out_dtype=dtype, p_dtype=dtype)
    expected = expect(inputs, [facts])
    return unseen_faults(fault_sizes(inputs, expected, faults), expected, facts)


def absorbed(regime: str = "normal", kv_len: int = 700, dtype: str = "bf16") -> AbsorbedInputs:
    inputs = make_inputs(CaseSpec.parse(f"decode-absorbed-h8-q1.kv{kv_len}-p64-{dtype}-{regime}-s0"))
    assert isinstance(inputs, AbsorbedInputs)
    return inputs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_regime_shows_the_faults_that_it_is_there_to_show(form: str, regime: str, dtype: str) -> None:
    inputs = make_inputs(CaseSpec.parse(form.format(dtype, regime)))
    assert not unseen(inputs, REGIME_TABLE[regime].shows, dtype)


def test_every_fault_is_shown_by_some_regime() -> None:
    assert {fault for regime in REGIME_TABLE.values() for fault in regime.shows} == set(FAULTS)


def test_a_fault_is_unseen_where_it_changes_nothing() -> None:
    normal = absorbed()
    nothing = {
        "zeros": replace(normal, ckv_cache=torch.zeros_like(normal.ckv_cache)),
        "no_rope": replace(normal, q_pe=torch.zeros_like(normal.q_pe)),
        "no_nope": replace(normal, q_nope=torch.zeros_like(normal.q_nope)),
        "sm_scale": absorbed("uniform"),
        # One key has all the mass, and it is not the last.
        "last_key": absorbed("peaked"),
    }
    assert nothing.keys() == FAULTS.keys()
    for fault, inputs in nothing.items():
        assert unseen(inputs, (fault,), "bf16") == [FAULTS[fault].what], fault


def test_a_row_with_one_key_claims_nothing_about_scores() -> None:
    # Softmax over one key is 1 whatever its score: such a case is no worse for it, and is not refused.
    inputs = absorbed(kv_len=1)
    facts = RoundingFacts(out_dtype="bf16")
    assert set(fault_sizes(inputs, expect(inputs, [facts]), tuple(FAULTS))) == {"zeros", "last_key"}


def test_a_batch_without_keys_claims_nothing() -> None:
    inputs = make_inputs(CaseSpec.parse("mixed-absorbed-h8-2xq1.kv0-p64-bf16-normal-s0"))
    facts = RoundingFacts(out_dtype="bf16")
    assert not fault_sizes(inputs, expect(inputs, [facts]), tuple(FAULTS))


def test_a_vacuous_case_is_not_run_and_never_green(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # q = 0 cannot show a wrong scale, whatever this regime says.
    claims_too_much = Regime(REGIME_TABLE["uniform"].edit, "q = 0", ("zeros", "sm_scale", "no_rope"))
    monkeypatch.setitem(REGIME_TABLE, "uniform", claims_too_much)
    report = tmp_path / "report.json"
    case = "decode-absorbed-h8-q1.kv100-p64-bf16-uniform-s0"
    result = invoke("kernels", "--kernel", "torch-absorbed", "--case", case, "--device", "cpu", "--json", str(report))
    assert result.exit_code == 3
    (only,) = json.loads(report.read_text())["results"]
    assert only["verdict"] == "NOT_RUN"
    assert only["reason"] == (
        "the case cannot tell: it would pass a kernel that ignores sm_scale or that drops the RoPE part of the scores"
    )


def test_a_wrong_kernel_fails_on_a_vacuous_case_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_verify.kernels.torch_sdpa import TorchAbsorbed

    claims_too_much = Regime(REGIME_TABLE["uniform"].edit, "q = 0", ("sm_scale",))
    monkeypatch.setitem(REGIME_TABLE, "uniform", claims_too_much)
    run = TorchAbsorbed.run

    def zeroed(self: TorchAbsorbed, inputs, out):  # type: ignore[no-untyped-def]
        result = run(self, inputs, out)
        result.out.zero_()
        return result

    monkeypatch.setattr(TorchAbsorbed, "run", zeroed)
    case = "decode-absorbed-h8-q1.kv100-p64-bf16-uniform-s0"
    result = invoke("kernels", "--kernel", "torch-absorbed", "--case", case, "--device", "cpu")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
