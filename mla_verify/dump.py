"""`--dump DIR`: the outputs of a run as files, which a run with another build is compared with (against.py).

DIR/<case>/<kernel>.safetensors holds out, and lse where there is one, as tensors.MLAOutput documents them: LSE
natural, [T, H]. Its metadata says where it comes from. DIR/dump.json, written last, lists every planned pair with its
verdict, the digest of its inputs, the declared roundings, and the file with its digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_verify.errors import UsageError
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.report.files import write_whole
from mla_verify.report.json_report import plain
from mla_verify.results import RunReport, Verdict

if TYPE_CHECKING:
    from mla_verify.outputs import Obtained
    from mla_verify.tensors import MLAInputs, MLAOutput

DUMP_VERSION = 1
INDEX = "dump.json"
_MAX_NAME = 120  # file systems allow 255 bytes, and a temporary file's name is longer than its target's


def why_no_dump(folder: Path) -> tuple[str, str] | None:
    """Why nothing can be dumped into a folder, with a hint, or None. It need not exist, its parent must."""
    if folder.exists() and not folder.is_dir():
        return "it is no folder", "name a folder that does not exist yet"
    if folder.is_dir():
        if (folder / INDEX).exists():
            return "it holds a dump already", "remove it, or name another folder: a dump is never overwritten"
        if any(folder.iterdir()):
            return "it is not empty and holds no finished dump", "name an empty folder, or one that does not exist yet"
    elif not folder.resolve().parent.is_dir():
        return f"the folder {folder.resolve().parent} does not exist", "make it first"
    created = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        (folder / ".probe").touch(exist_ok=False)
        (folder / ".probe").unlink()
        if created:
            folder.rmdir()
    except OSError as error:
        return f"nothing can be written there ({error.strerror})", "name a folder that can be written"
    return None


def safe_name(text: str) -> str:
    """A name for a file: `text` where that can be one, else what can be of it and a digest of the whole."""
    safe = re.sub(r"[^A-Za-z0-9._+-]", "_", text)
    if safe == text and len(text) <= _MAX_NAME and not text.startswith("."):
        return text
    return f"{safe[:_MAX_NAME].lstrip('.')}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def inputs_digest(inputs: MLAInputs) -> str:
    """SHA-256 over everything a kernel is given, on whatever device it lies."""
    import torch

    digest = hashlib.sha256()
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor):
            digest.update(f"{field.name} {value.dtype} {list(value.shape)}\0".encode())
            digest.update(value.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(f"{field.name} {value!r}\0".encode())
    return digest.hexdigest()


class DumpWriter:
    """Writes outputs as they come, each whole or not at all, and the index last."""

    def __init__(self, folder: Path, about: Mapping[str, str]) -> None:
        """about: metadata of every file, e.g. device and package hash."""
        self._folder, self._about = folder, about
        self._pairs: dict[tuple[str, str], dict[str, Any]] = {}
        self._error: OSError | None = None

    def write(self, obtained: Obtained, inputs: str) -> None:
        """Write one output. What cannot be written costs no verdict: `finish` raises it."""
        try:
            self._pairs[obtained.entry.case_id, obtained.entry.kernel.name] = self._written(obtained, inputs)
        except Exception as error:  # out of memory for a copy, say
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """An output is missing: the dump cannot be finished."""
        own = error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")
        self._error = self._error or own

    def _written(self, obtained: Obtained, inputs: str) -> dict[str, Any]:
        """Write one output; its entry in the index."""
        from safetensors.torch import save

        entry, output = obtained.entry, obtained.output
        tensors = {"out": output.out} | ({} if output.lse is None else {"lse": output.lse})
        content = save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            {
                **self._about,
                "case": entry.case_id,
                "kernel": entry.kernel.name,
                "version": _version(obtained),
                "dtype": obtained.facts.out_dtype,
            },
        )
        file = Path(safe_name(entry.case_id), f"{safe_name(entry.kernel.name)}.safetensors")
        (self._folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / file, content)
        return {
            "inputs": inputs,
            "facts": asdict(obtained.facts),
            "file": file.as_posix(),
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    def finish(self, report: RunReport) -> None:
        """Write the index, which makes the folder a dump. Raises OSError when it or an output could not be written."""
        if self._error is not None:
            raise self._error
        nothing = {"inputs": None, "facts": None, "file": None, "sha256": None}
        pairs = [
            {"case": r.case, "kernel": r.kernel, "verdict": r.verdict.value}
            | self._pairs.get((r.case, r.kernel), nothing)
            for r in report.results
        ]
        document = {"dump_version": DUMP_VERSION, "environment": plain(report.environment), "pairs": pairs}
        self._folder.mkdir(exist_ok=True)
        write_whole(self._folder / INDEX, json.dumps(document, indent=1) + "\n")


def _version(obtained: Obtained) -> str:
    try:
        return obtained.entry.kernel.version()
    except Exception:  # the library's, which may fail in any way
        return "unknown"


@dataclass(frozen=True)
class DumpedPair:
    verdict: Verdict
    inputs: str | None  # digest; None: there is no output
    facts: RoundingFacts | None
    file: Path | None


@dataclass(frozen=True)
class Dump:
    """A checked dump. Its tensors are read by `load` alone."""

    folder: Path
    environment: Mapping[str, Any]
    pairs: Mapping[tuple[str, str], DumpedPair]  # by case id and kernel

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kernel for _, kernel in self.pairs))

    def load(self, pair: DumpedPair, device: str) -> MLAOutput:
        """The output of a pair that has one."""
        from safetensors.torch import load_file

        from mla_verify.tensors import MLAOutput

        assert pair.file is not None
        tensors = load_file(pair.file, device=device)
        return MLAOutput(tensors["out"], tensors.get("lse"))


def read_dump(folder: Path) -> Dump:
    """The dump in a folder, every file held against its digest. Raises UsageError for anything else."""
    hint = "give a folder that `mla-verify kernels --dump` of this version has written"
    if not folder.is_dir():
        raise UsageError(f"--against {folder}: there is no such folder", hint)
    index = folder / INDEX
    if not index.is_file():
        raise UsageError(f"--against {folder}: it has no {INDEX}, which a finished run writes last", hint)
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
        version = document["dump_version"]
        if version != DUMP_VERSION:
            raise UsageError(f"{index} has schema version {version!r}; this mla-verify reads {DUMP_VERSION}", hint)
        pairs = {(pair["case"], pair["kernel"]): _pair(folder, pair) for pair in document["pairs"]}
        return Dump(folder, dict(document["environment"]), pairs)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{index} is no index of a dump: {type(error).__name__}: {error}", hint) from error


def _pair(folder: Path, pair: Mapping[str, Any]) -> DumpedPair:
    verdict = Verdict(pair["verdict"])
    if pair["file"] is None:
        return DumpedPair(verdict, None, None, None)
    file = folder / pair["file"]
    try:
        found = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{file} of the dump cannot be read: {error.strerror}", "dump that build again") from error
    if found != pair["sha256"]:
        raise UsageError(f"{file} is not what the dump wrote: damaged, cut short or replaced", "dump that build again")
    facts: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in pair["facts"].items()}
    return DumpedPair(verdict, str(pair["inputs"]), RoundingFacts(**facts), file)
