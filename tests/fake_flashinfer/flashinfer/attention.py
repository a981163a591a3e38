"""The attention behind the fake wrappers."""

import math

import torch

import flashinfer


class Wrapper:
    def __init__(self, float_workspace_buffer, backend):
        if float_workspace_buffer.dtype not in (torch.uint8, torch.int8) or float_workspace_buffer.numel() < 1 << 20:
            raise ValueError("workspace buffer")
        self._workspace = float_workspace_buffer
        self._backend = flashinfer.falls_back_to or backend

    def check_ready(self, **tensors):
        """Raise what the real launchers would, or do worse than raise."""
        if not bool((self._workspace[::4096] == 0xFF).all()):
            raise AssertionError("the workspace still holds what the last call left there")
        self._workspace[: 1 << 16] = 0  # partial results
        for name, tensor in tensors.items():
            if tensor.stride(-1) != 1:
                raise ValueError(f"{name} has a last dim that is not contiguous, which the real kernels do not check")


def check_int32(**tensors):
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32")


def attend(q, k, v, *, causal, sm_scale, empty):
    """q [q_len, H, D], k [kv_len, Hk, D], v [kv_len, Hk, V] -> out [q_len, H, V] and lse [q_len, H], base 2.

    empty: (out, lse) of a row without keys; out is None for the mean of all values.
    """
    q, k, v = q.double(), k.double(), v.double()
    q_len, kv_len = len(q), len(k)
    scores = torch.einsum("qhd,khd->qhk", q, k.expand(-1, q.shape[1], -1)) * sm_scale
    if causal:
        hidden = torch.arange(kv_len) > torch.arange(q_len)[:, None] + kv_len - q_len
        scores = scores.masked_fill(hidden[:, None], -math.inf)
    lse = scores.logsumexp(-1) if kv_len else torch.full(scores.shape[:2], -math.inf, dtype=torch.float64)
    weights = (scores - lse.clamp_min(torch.finfo(torch.float64).min)[..., None]).exp()
    out = torch.einsum("qhk,khd->qhd", weights, v.expand(-1, q.shape[1], -1))
    none = lse == -math.inf
    empty_out, empty_lse = empty
    if kv_len and empty_out is None:
        out[none] = v.mean(0).expand_as(out)[none]
    return out, (lse / math.log(2)).masked_fill(none, empty_lse)
