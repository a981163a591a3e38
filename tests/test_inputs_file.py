"""Real activations are judged like a made case; a malformed file is told in one message, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mla_verify.cases import CaseSpec
from mla_verify.errors import UsageError
from mla_verify.formats import DTYPES
from mla_verify.inputs import GARBAGE_PAGE, make_inputs
from mla_verify.inputs_file import read_inputs_file
from mla_verify.tensors import AbsorbedInputs
from tests.cli_helper import invoke

ABSORBED = "mixed-absorbed-h8-q1.kv33+q2.kv70-p16-{}-mixed-s0"
MHA = "mixed-mha-h8-q1.kv33+q2.kv70-ragged-{}-mixed-s0"


def tensors_of(case: str, poison: float = 7.0) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A made case as somebody would dump it: junk, but no NaN, in the slots that nobody references."""
    inputs = make_inputs(CaseSpec.parse(case), poison=poison)
    tensors = {name: t.contiguous().clone() for name, t in inputs.named_tensors().items()}
    if not isinstance(inputs, AbsorbedInputs):
        del tensors["kv_lens"]
    return tensors, {"sm_scale": repr(inputs.sm_scale)}


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    save_file(tensors, path, metadata=metadata)
    return path


@pytest.mark.parametrize("case", [ABSORBED, MHA])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_gives_the_tensors_it_was_made_from_with_its_unused_slots_poisoned(
    case: str, dtype: str, tmp_path: Path
) -> None:
    spec = CaseSpec.parse(case.format(dtype))
    file = read_inputs_file(write(tmp_path / "layer.safetensors", *tensors_of(spec.id)))
    assert (file.form, file.dtype, file.causal, file.sm_scale) == (spec.form, dtype, True, spec.sm_scale)
    made, read = make_inputs(spec).named_tensors(), file.load().named_tensors()
    assert made.keys() == read.keys()
    for name, tensor in made.items():
        # NaN where the file held 7.0, huge page numbers past the last page: as made.
        assert torch.equal(tensor.view(torch.uint8), read[name].view(torch.uint8)), name


def test_table_entries_past_the_last_page_may_hold_anything(tmp_path: Path) -> None:
    tensors, metadata = tensors_of(ABSORBED.format("bf16"))
    tensors["page_table"][tensors["page_table"] == GARBAGE_PAGE] = -1
    loaded = read_inputs_file(write(tmp_path / "x.safetensors", tensors, metadata)).load()
    assert isinstance(loaded, AbsorbedInputs)
    assert int(loaded.page_table.max()) == GARBAGE_PAGE
    assert int(loaded.page_table.min()) > 0


@pytest.mark.parametrize("case", [ABSORBED, MHA])
def test_the_command_runs_a_file_as_one_case(case: str, tmp_path: Path) -> None:
    path = write(tmp_path / "layer12.safetensors", *tensors_of(case.format("bf16")))
    result = invoke("kernels", "--inputs", str(path), "--device", "cpu")
    assert result.exit_code == 0, result.stdout + result.stderr
    assert re.search(r"^ torch-\w+ +1 +1 +1 ", result.stdout, re.MULTILINE)
    assert ", 0 wrong (exit 0)" in result.stdout


@pytest.mark.parametrize(
    ("requests", "phase"),
    [
        ("2xq1.kv9", "decode"),
        ("q2.kv9+q4.kv9", "spec"),
        ("q9.kv9+q5.kv5", "prefill"),
        ("q5.kv9+q6.kv7", "prefix"),
        ("q1.kv9+q9.kv9", "mixed"),
    ],
)
def test_the_phase_follows_from_the_lengths(requests: str, phase: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", *tensors_of(f"mixed-absorbed-h8-{requests}-p16-fp32-normal-s0"))
    assert read_inputs_file(path).phase == phase


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any], dict[str, str]], None]:
    def apply(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return apply


def put(index: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[index] = value
        return tensor

    return change


# What is done to a good absorbed file, and what the message must name.
BAD = {
    "missing tensor": (lambda t, m: t.pop("kpe_cache"), "lacks kpe_cache"),
    "extra tensor": (lambda t, m: t.update(q_nop=t["q_nope"].clone()), "q_nop"),
    "no tensors of any form": (lambda t, m: [t.pop(k) for k in list(t) if k != "kv_lens"], "lacks"),
    "wrong rank": (edit("q_nope", lambda x: x[0]), "q_nope has shape"),
    "heads differ": (edit("q_pe", lambda x: x[:, :4]), "q_pe"),
    "rank differs": (edit("ckv_cache", lambda x: x[..., :500]), "ckv_cache"),
    "page sizes differ": (edit("kpe_cache", lambda x: x[:, :8]), "kpe_cache"),
    "requests differ": (edit("kv_lens", lambda x: x[:1]), "kv_lens"),
    "indptr too short": (edit("qo_indptr", lambda x: x[:2]), "qo_indptr has 2 entries for 2 requests"),
    "mixed dtypes": (edit("q_pe", lambda x: x.float()), "dtypes differ"),
    "float64": (edit("q_pe", lambda x: x.double()), "q_pe has dtype F64"),
    "int8": (edit("ckv_cache", lambda x: x.to(torch.int8)), "ckv_cache has dtype I8"),
    "float index": (edit("page_table", lambda x: x.float()), "page_table has dtype F32"),
    "page out of range": (edit("page_table", put(0, 99)), "page_table[0][0] is page 99"),
    "negative page": (edit("page_table", put(0, -1)), "page_table[0][0] is page -1"),
    "negative kv_len": (edit("kv_lens", put(0, -5)), "kv_lens[0] is -5"),
    "kv_len past the table": (edit("kv_lens", put(0, 4000)), "kv_lens[0] is 4000"),
    "indptr falls": (edit("qo_indptr", put(1, 5)), "qo_indptr is [0, 5, 3]"),
    "indptr ends early": (edit("qo_indptr", put(2, 2)), "must rise from 0 to 3"),
    "no sm_scale": (lambda t, m: m.pop("sm_scale"), "lacks sm_scale"),
    "sm_scale no number": (lambda t, m: m.update(sm_scale="fast"), "fast"),
    "sm_scale negative": (lambda t, m: m.update(sm_scale="-0.1"), "sm_scale is -0.1"),
    "sm_scale nan": (lambda t, m: m.update(sm_scale="nan"), "sm_scale is nan"),
    "causal": (lambda t, m: m.update(causal="maybe"), "causal is 'maybe'"),
    "unknown metadata": (lambda t, m: m.update(sm_scal="1"), "sm_scal"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_malformed_file_is_one_message_that_names_what_is_wrong(what: str, tmp_path: Path) -> None:
    change, named = BAD[what]
    tensors, metadata = tensors_of(ABSORBED.format("bf16"))
    change(tensors, metadata)
    path = write(tmp_path / "bad.safetensors", tensors, metadata)
    with pytest.raises(UsageError) as caught:
        read_inputs_file(path)
    assert named in caught.value.message
    assert caught.value.hint
    result = invoke("kernels", "--inputs", str(path), "--device", "cpu")
    assert result.exit_code == 2
    assert named in result.stderr
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr


def test_rope_dims_that_q_does_not_have_are_refused(tmp_path: Path) -> None:
    tensors, metadata = tensors_of(MHA.format("bf16"))
    path = write(tmp_path / "bad.safetensors", tensors, metadata | {"qk_rope_head_dim": "192"})
    with pytest.raises(UsageError, match="qk_rope_head_dim is 192, q has 192 dims"):
        read_inputs_file(path)


@pytest.mark.parametrize("content", ["empty", "text", "truncated"])
def test_what_is_no_safetensors_file_is_told_so(content: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "good.safetensors", *tensors_of(ABSORBED.format("bf16"))).read_bytes()
    path = tmp_path / "bad.safetensors"
    path.write_bytes({"empty": b"", "text": b"q_nope = 1\n" * 20, "truncated": whole[: len(whole) // 2]}[content])
    result = invoke("kernels", "--inputs", str(path), "--device", "cpu")
    assert result.exit_code == 2
    assert "cannot be read as safetensors" in result.stderr
    assert "Traceback" not in result.stderr
