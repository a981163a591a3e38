"""`--inputs FILE.safetensors`: real activations as one case.

Absorbed form, names and shapes as in tensors.AbsorbedInputs:
    q_nope [T, H, R]  q_pe [T, H, P]  ckv_cache [pages, page_size, R]  kpe_cache [pages, page_size, P]
    page_table [B, max_pages]  kv_lens [B]  qo_indptr [B + 1]
Non-absorbed form, as in tensors.MHAInputs:
    q [T, H, D]  k [S, H, D]  v [S, H, V]  kv_indptr [B + 1]  qo_indptr [B + 1]
The file's metadata holds sm_scale (required), causal ("true", the default, or "false") and, for the non-absorbed form,
qk_rope_head_dim (64 unless given). Floating tensors share one of the dtypes fp32, fp16, bf16; index tensors are
int32 or int64. Slots that no request references are poisoned as in a made case.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_verify.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from mla_verify.tensors import AttentionInputs

# name -> shape, by letters that must agree within the file; "?" is free.
_SHAPES = {
    "absorbed": {
        "q_nope": "THR",
        "q_pe": "THP",
        "ckv_cache": "NsR",
        "kpe_cache": "NsP",
        "page_table": "B?",
        "kv_lens": "B",
        "qo_indptr": "I",
    },
    "mha": {"q": "THD", "k": "SHD", "v": "SHV", "kv_indptr": "I", "qo_indptr": "I"},
}
_INDEX = ("page_table", "kv_lens", "qo_indptr", "kv_indptr")
_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_METADATA = ("sm_scale", "causal", "qk_rope_head_dim")


@dataclass(frozen=True)
class FileCase:
    """A checked file. Its floating tensors are read by `load` alone."""

    path: Path
    spec_id: str  # inputs-<name>-<first digits of the file's sha256>
    form: str
    dtype: str
    phase: str
    sm_scale: float
    causal: bool
    qk_rope_head_dim: int

    def load(self) -> AttentionInputs:
        """The tensors, on the CPU, with every unreferenced slot poisoned."""
        import torch
        from safetensors.torch import load_file

        from mla_verify.inputs import poison_unreferenced
        from mla_verify.tensors import AbsorbedInputs, MHAInputs

        tensors = load_file(self.path)
        given: dict[str, Any] = {name: tensors[name] for name in _SHAPES[self.form]}
        given |= {name: t.to(torch.int32) for name, t in given.items() if name in _INDEX}
        if self.form == "absorbed":
            return poison_unreferenced(AbsorbedInputs(**given, sm_scale=self.sm_scale, causal=self.causal))
        kv_lens = given["kv_indptr"].diff()
        return MHAInputs(
            **given,
            kv_lens=kv_lens,
            sm_scale=self.sm_scale,
            causal=self.causal,
            qk_rope_head_dim=self.qk_rope_head_dim,
        )


def read_inputs_file(path: Path) -> FileCase:
    """Check a file's names, shapes, dtypes and index tensors. Raises UsageError that names what is wrong."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            shapes = {name: tuple(s.get_shape()) for name, s in slices.items()}
            dtypes = {name: s.get_dtype() for name, s in slices.items()}
            indices = {name: file.get_tensor(name).long() for name in _INDEX if name in slices}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path} cannot be read as safetensors: {error}", "write it with safetensors.torch.save_file"
        ) from error
    form = _form(path, shapes)
    _check_shapes(path, form, shapes)
    dtype = _dtype(path, form, dtypes)
    sm_scale, causal, rope = _settings(path, metadata)
    _check_indices(path, form, shapes, indices)
    if form == "mha" and not 0 <= rope < shapes["q"][2]:
        raise _wrong(path, f"qk_rope_head_dim is {rope}, q has {shapes['q'][2]} dims", "give it in the metadata")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(path)
    return FileCase(
        path=path,
        spec_id=f"inputs-{path.stem}-{digest[:12]}",
        form=form,
        dtype=dtype,
        phase=_phase(indices),
        sm_scale=sm_scale,
        causal=causal,
        qk_rope_head_dim=rope,
    )


def _wrong(path: Path, message: str, hint: str) -> UsageError:
    return UsageError(f"{path}: {message}", hint)


def _digest(path: Path) -> str:
    """hashlib.file_digest for Python 3.10."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _form(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> str:
    missing = {form: [name for name in names if name not in shapes] for form, names in _SHAPES.items()}
    form = min(missing, key=lambda f: len(missing[f]))
    if missing[form]:
        needed = ", ".join(_SHAPES[form])
        raise _wrong(
            path, f"lacks {', '.join(missing[form])}; it has {', '.join(shapes) or 'nothing'}", f"{form} needs {needed}"
        )
    unknown = [name for name in shapes if name not in _SHAPES[form]]
    if unknown:
        hint = did_you_mean(unknown[0], _SHAPES[form], f"{form} takes {', '.join(_SHAPES[form])} and nothing else")
        raise _wrong(path, f"has a tensor {unknown[0]} that no form takes", hint)
    return form


def _check_shapes(path: Path, form: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    sizes: dict[str, tuple[int, str]] = {}
    for name, letters in _SHAPES[form].items():
        shape = shapes[name]
        if len(shape) != len(letters):
            raise _wrong(path, f"{name} has shape {list(shape)}, it needs {len(letters)} dimensions", f"see {__name__}")
        for letter, size in zip(letters, shape, strict=True):
            first, where = sizes.setdefault(letter, (size, name))
            if letter != "?" and first != size:
                raise _wrong(
                    path,
                    f"{name} {list(shape)} does not fit {where} {list(shapes[where])}: {size} is not {first}",
                    f"{name} is laid out as {_described(form, name)}, {where} as {_described(form, where)}",
                )
    if form == "absorbed" and sizes["B"][0] + 1 != sizes["I"][0]:
        raise _wrong(path, f"qo_indptr has {sizes['I'][0]} entries for {sizes['B'][0]} requests", "it needs one more")
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if empty:
        raise _wrong(
            path, f"{empty[0]} is empty, shape {list(shapes[empty[0]])}", "a case needs tokens, heads and keys"
        )


_WORDS = {
    "T": "tokens", "H": "heads", "R": "kv_lora_rank", "P": "qk_rope_head_dim", "N": "pages", "s": "page_size",
    "B": "requests", "I": "requests + 1", "S": "keys", "D": "qk_dim", "V": "v_head_dim", "?": "max_pages",
}  # fmt: skip


def _described(form: str, name: str) -> str:
    return f"[{', '.join(_WORDS[letter] for letter in _SHAPES[form][name])}]"


def _dtype(path: Path, form: str, dtypes: Mapping[str, str]) -> str:
    for name in _SHAPES[form]:
        wanted = ("I32", "I64") if name in _INDEX else tuple(_DTYPES)
        if dtypes[name] not in wanted:
            raise _wrong(
                path, f"{name} has dtype {dtypes[name]}, it needs {' or '.join(wanted)}", "convert it before saving"
            )
    floats = {name: dtypes[name] for name in _SHAPES[form] if name not in _INDEX}
    if len(set(floats.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in floats.items())
        raise _wrong(path, f"the dtypes differ: {listed}", "queries and cache must share one dtype")
    return _DTYPES[next(iter(floats.values()))]


def _settings(path: Path, metadata: Mapping[str, str]) -> tuple[float, bool, int]:
    hint = 'save_file(tensors, path, metadata={"sm_scale": "0.1352", "causal": "true"})'
    for name in metadata:
        if name not in _METADATA and name != "format":
            raise _wrong(path, f"unknown metadata {name!r}", did_you_mean(name, _METADATA, hint))
    if "sm_scale" not in metadata:
        raise _wrong(path, "its metadata lacks sm_scale", hint)
    try:
        sm_scale, rope = float(metadata["sm_scale"]), int(metadata.get("qk_rope_head_dim", "64"))
    except ValueError as error:
        raise _wrong(path, f"its metadata does not read: {error}", hint) from error
    if not (0 < sm_scale < math.inf):
        raise _wrong(path, f"sm_scale is {sm_scale}", "a softmax scale is positive and finite")
    causal = metadata.get("causal", "true").lower()
    if causal not in ("true", "false"):
        raise _wrong(path, f"causal is {causal!r}", "write true or false")
    return sm_scale, causal == "true", rope


def _check_indices(path: Path, form: str, shapes: Mapping[str, tuple[int, ...]], indices: Mapping[str, Any]) -> None:
    rows = {"qo_indptr": shapes["q_nope" if form == "absorbed" else "q"][0]}
    if form == "mha":
        rows["kv_indptr"] = shapes["k"][0]
    for name, total in rows.items():
        indptr = indices[name].tolist()
        if indptr[0] != 0 or indptr[-1] != total or indptr != sorted(indptr):
            raise _wrong(path, f"{name} is {indptr[:8]}..., it must rise from 0 to {total}", "it holds running totals")
    if form == "absorbed":
        from mla_verify.reference.paged import page_table_to_indptr

        num_pages, page_size = shapes["ckv_cache"][:2]
        try:
            page_table_to_indptr(indices["page_table"], indices["kv_lens"], page_size=page_size, num_pages=num_pages)
        except ValueError as error:
            raise _wrong(path, str(error), "page ids index ckv_cache's first dimension") from error


def _phase(indices: Mapping[str, Any]) -> str:
    """The phase a file's lengths amount to."""
    q_lens = indices["qo_indptr"].diff().tolist()
    kv_lens = (indices["kv_lens"] if "kv_lens" in indices else indices["kv_indptr"].diff()).tolist()
    live = [(q, kv) for q, kv in zip(q_lens, kv_lens, strict=True) if q and kv]
    if all(q == 1 for q, _ in live):
        return "decode"
    if all(2 <= q <= 4 and q < kv for q, kv in live):
        return "spec"
    if all(q == kv for q, kv in live):
        return "prefill"
    return "prefix" if all(q < kv for q, kv in live) else "mixed"
