"""The inputs that one kernel gets, at their place in memory, and what was done to them there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_verify.tensors import Buffers, MLAInputs, MLAOutput, WriteInputs, output_buffers

NAN = float("nan")
# What is compared at a time, in elements: a pool of many GB must not need as much again.
_CHUNK = 1 << 26
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Placed:
    """Inputs as one kernel gets them, and what nobody may change there."""

    inputs: MLAInputs  # for the kernel alone
    plain: MLAInputs  # the same numbers in the split layout, which no kernel gets
    poison: float = NAN
    # By the tensor that they lie beside: views that hold nothing but poison.
    around: Mapping[str, Tensor] = field(default_factory=dict)
    first_page: int = 0  # of the caches: what is referenced starts here
    # A write into a far cache, which is there once: inputs.kv_cache is `out` of these buffers.
    cache: Buffers | None = None
    _shapes: Mapping[str, object] = field(init=False)
    # What is there now, as views of their own, since a kernel may reshape its tensors in place; and what was there.
    _held: Mapping[str, tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        given, plain = self.inputs.named_tensors(), self.plain.named_tensors()
        object.__setattr__(self, "_shapes", {name: (t.shape, t.stride()) for name, t in given.items()})
        held = {}
        for name, tensor in given.items():
            view, before = tensor.detach(), plain[name]
            if self.first_page and name.endswith("_cache"):
                view = view[self.first_page :]
            elif self.first_page and name in ("page_table", "slots"):
                before = tensor.clone()
            if self.cache is None or name != "kv_cache":
                held[name] = (view, before)
        object.__setattr__(self, "_held", held)

    def buffers(self, dtype: torch.dtype) -> Buffers:
        """What the kernel writes into, see `output_buffers`. Of a write into a far cache the same each time."""
        if self.cache is None:
            return output_buffers(self.inputs, dtype)
        assert isinstance(self.plain, WriteInputs)
        self.cache.output.out[self.first_page :] = self.plain.kv_cache
        return self.cache

    def result(self, output: MLAOutput) -> MLAOutput:
        """What a kernel returned on `inputs`, as a result on `plain`: of a far cache the pages of the plain one."""
        return output if self.cache is None else MLAOutput(output.out[self.first_page :].clone(), None)

    def damage(self) -> str | None:
        """What was changed that nobody may change, in words, or None. Every element is looked at."""
        given = self.inputs.named_tensors()
        changed = [
            name
            for name, tensor in given.items()
            if (tensor.shape, tensor.stride()) != self._shapes[name]
            or (name in self._held and not _same_bytes(*self._held[name]))
        ]
        if changed:
            return f"the kernel changed its input {' and '.join(changed)} in place"
        for name, view in self.around.items():
            row = first_other_row(view, self.poison)
            if row is not None:
                return f"the kernel changed what lies beside its input {name}, first in row {row}"
        return None

    def spilled(self, output: MLAOutput) -> str | None:
        """What a write left in a far cache outside the pages that have slots of the case, in words, or None."""
        slot = None if self.cache is None else first_other_row(output.out[: self.first_page], self.poison)
        return None if slot is None else f"the kernel wrote into slot {slot} of the cache, which no token has"


def first_other_row(view: Tensor, value: float) -> int | None:
    """The first row of `view` [.., D] in which an element has other bits than `value`, or None. Rows count over all
    dims but the last.
    """
    rows = view.flatten(0, -2).view(_BITS[view.element_size()])
    wanted = torch.tensor(value, dtype=view.dtype, device=view.device).view(rows.dtype)
    chunks = rows.split(max(1, _CHUNK // rows.shape[-1]))
    # One answer for all chunks: each would make the host wait for the device.
    found = torch.stack([(chunk != wanted).any() for chunk in chunks]).tolist() if len(rows) else []
    if not any(found):
        return None
    index = found.index(True)
    return index * len(chunks[0]) + int((chunks[index] != wanted).any(-1).int().argmax())


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """NaN poison equals itself, and -0.0 is not 0.0."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
