"""Whether something large fits into memory: asked before it is allocated, where running out would cost more."""

from __future__ import annotations

import torch

from mla_verify import memory

# On a CPU running out of memory kills processes, and a kernel may copy what it is given.
_CPU_SHARE = 2


def ensure_room(num_bytes: int, device: torch.device, what: str) -> None:
    """Raise MemoryError naming both sizes unless `num_bytes` are free on the device, on a CPU twice as many."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        needed, more = num_bytes, ""
    else:
        free = memory.available()
        needed, more = _CPU_SHARE * num_bytes, ", and as much again where a kernel copies it"
    if needed > free:
        raise MemoryError(f"{what} takes {num_bytes / 1e9:.1f} GB{more}; {free / 1e9:.1f} GB are free")
