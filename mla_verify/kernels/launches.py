"""Which kernels a call launched on the GPU, as the GPU's own trace has them, and whether they are those asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from mla_verify.errors import FallbackError

_T = TypeVar("_T")


def traced(call: Callable[[], _T]) -> tuple[_T, tuple[str, ...]]:
    """What `call` returned and the names of the kernels that it launched, each once; none where nothing is traced.

    Takes milliseconds, and about a second the first time in a process.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    # The profiler reads it when it is first used, and writes to stderr whenever it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        result = call()
        torch.cuda.synchronize()
    events = trace.events() or ()
    return result, tuple(dict.fromkeys(e.name for e in events if e.device_type.name == "CUDA"))


def confirm(asked: str, known: Mapping[str, str], launched: tuple[str, ...]) -> str | None:
    """The name under which `asked` was launched, as `known` has it; None if it did not show under that name.

    known: choice -> name of its kernel. Raises FallbackError when the kernel of another choice ran in its place. A
    name that is not known tells nothing: other versions have other names.
    """
    ran = [choice for choice, name in known.items() if any(name in full for full in launched)]
    if asked in ran:
        return known[asked]
    if ran:
        raise FallbackError(f"asked for {asked}, and the GPU ran {' and '.join(known[choice] for choice in ran)}")
    return None
