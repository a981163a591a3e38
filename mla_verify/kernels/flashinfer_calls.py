"""How FlashInfer is called: a wrapper is planned for the batch, then run, as engines do it for every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_verify.errors import FallbackError
from mla_verify.kernels import launches
from mla_verify.kernels.flashinfer_api import APPEND, CONCAT, MLA_INIT, MLA_KERNELS, RAGGED_INIT, RAGGED_KERNELS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mla_verify.kernels.entry import Entry
    from mla_verify.tensors import AbsorbedInputs, ConcatInputs, MHAInputs, MLAOutput, WriteInputs

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends

# What was seen to run, by kernel, dtype and mask: traced once, since a trace takes as long as many calls.
_seen: dict[tuple[object, ...], str | None] = {}


@lru_cache
def _workspace(device: torch.device) -> Tensor:
    import torch

    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@lru_cache
def _wrapper(init: Entry, backend: str, device: torch.device) -> Any:
    """One for each backend, planned anew for each batch: as in an engine, its buffers hold the last batch's plan."""
    cls = getattr(import_module(init.module), init.name.partition(".")[0])
    options = {"kv_layout": "NHD"} if "kv_layout" in init.parameters else {}
    return cls(float_workspace_buffer=_workspace(device), backend=backend, **options)


@dataclass(frozen=True)
class Keys:
    """Where the keys of each request are, as FlashInfer takes it: int32; lengths on the CPU, where plans are made."""

    page_size: int
    indptr: Tensor  # [B + 1], pages before each request
    indices: Tensor  # [indptr[-1]], the pages of all requests in order, on the GPU
    kv_lens: Tensor  # [B]


def keys_by_page(inputs: AbsorbedInputs | WriteInputs, page_size: int) -> Keys:
    """The pages of the page table that hold keys. Requests without keys have none, and stay."""
    import torch

    from mla_verify.inputs import indptr

    kv_lens = inputs.kv_lens.cpu()
    counts = (kv_lens + page_size - 1) // page_size
    columns = torch.arange(inputs.page_table.shape[1])
    used = (columns < counts[:, None]).to(inputs.device)
    return Keys(page_size, indptr(counts.tolist()), inputs.page_table[used].int(), kv_lens)


def keys_by_token(inputs: AbsorbedInputs) -> Keys:
    """One page for each key, with the number of its slot, as SGLang numbers them whatever its page size is."""
    import torch

    from mla_verify.inputs import indptr, slots_of

    kv_lens = inputs.kv_lens.cpu()
    lengths, page_size = kv_lens.tolist(), inputs.ckv_cache.shape[1]
    slots = [slots_of(inputs.page_table, b, page_size, n) for b, n in enumerate(lengths)]
    return Keys(1, indptr(lengths), torch.cat(slots).int(), kv_lens)


def attend(
    backend: str, inputs: AbsorbedInputs, keys: Keys, caches: tuple[Tensor, ...], out: MLAOutput, *, causal: bool
) -> str:
    """Attention over the latent cache, caches [pages, keys.page_size, R] and [.., P]. Returns what ran.

    Writes out [T, H, R] and lse [T, H], base 2. Raises FallbackError when another backend ran.
    """
    q = inputs.q_nope
    wrapper = _poisoned(_wrapper(MLA_INIT, backend, q.device), q.device)
    wrapper.plan(
        qo_indptr=inputs.qo_indptr.cpu(),
        kv_indptr=keys.indptr,
        kv_indices=keys.indices,
        kv_len_arr=keys.kv_lens,
        num_heads=q.shape[1],
        head_dim_ckv=q.shape[2],
        head_dim_kpe=inputs.q_pe.shape[2],
        page_size=keys.page_size,
        causal=causal,
        sm_scale=inputs.sm_scale,
        q_data_type=q.dtype,
        kv_data_type=caches[0].dtype,
    )
    call = partial(
        wrapper.run,
        q_nope=q,
        q_pe=inputs.q_pe,
        ckv_cache=caches[0],
        kpe_cache=caches[1],
        out=out.out,
        lse=out.lse,
        return_lse=True,
    )
    return _run(call, wrapper, backend, MLA_KERNELS, q, causal)


def attend_ragged(backend: str, inputs: MHAInputs, out: MLAOutput, *, causal: bool) -> str:
    """Attention with keys of every head's own. Writes out [T, H, V] and lse [T, H], base 2. Returns what ran.

    Raises FallbackError when another backend ran.
    """
    q = inputs.q
    wrapper = _poisoned(_wrapper(RAGGED_INIT, backend, q.device), q.device)
    wrapper.plan(
        qo_indptr=inputs.qo_indptr.cpu(),
        kv_indptr=inputs.kv_indptr.cpu(),
        num_qo_heads=q.shape[1],
        num_kv_heads=inputs.k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_vo=inputs.v_dim,
        causal=causal,
        sm_scale=inputs.sm_scale,
        q_data_type=q.dtype,  # float16 unless told
        kv_data_type=inputs.k.dtype,
    )
    call = partial(wrapper.run, q=q, k=inputs.k, v=inputs.v, out=out.out, lse=out.lse, return_lse=True)
    return _run(call, wrapper, backend, RAGGED_KERNELS, q, causal)


def _poisoned(wrapper: Any, device: torch.device) -> Any:
    # NaN in every dtype: a part that is merged without having been written must show.
    _workspace(device).fill_(0xFF)
    return wrapper


def _run(
    call: Callable[[], object], wrapper: Any, backend: str, kernels: Mapping[str, str], q: Tensor, causal: bool
) -> str:
    chosen = getattr(wrapper, "_backend", backend)
    if chosen != backend:
        raise FallbackError(f"asked for {backend}, and {type(wrapper).__name__} chose {chosen}")
    kernel = launched(call, (type(wrapper).__name__, backend, q.dtype, causal), q.device.type, backend, kernels)
    return f"{type(wrapper).__name__}, {backend}" + (f": {kernel}" if kernel else "")


def launched(
    call: Callable[[], object], key: tuple[object, ...], device: str, asked: str, known: Mapping[str, str]
) -> str | None:
    """Call it, with a trace the first time for this `key`. Returns the kernel that was seen to run, if one was."""
    if device != "cuda" or key in _seen:
        call()
        seen = _seen.get(key)
        return seen and f"{seen}, as traced in the first call"
    _, names = launches.traced(call)
    _seen[key] = launches.confirm(asked, known, names)
    return _seen[key]


def _run_function(entry: Entry, call: Callable[[], object], like: Tensor, kernel: str) -> str:
    seen = launched(call, (entry.name, like.dtype), like.device.type, entry.name, {entry.name: kernel})
    return entry.name + (f": {seen}" if seen else "")


def append(inputs: WriteInputs, kv_cache: Tensor) -> str:
    """Write the new tokens into kv_cache [pages, page_size, R + P]. Returns what ran."""
    import torch

    page_size, device = kv_cache.shape[1], kv_cache.device
    keys = keys_by_page(inputs, page_size)
    batch_indices, positions = owners(inputs, page_size)
    ckv_cache, kpe_cache = kv_cache.split([inputs.ckv.shape[1], inputs.kpe.shape[1]], dim=-1)
    call = partial(
        APPEND.load(),
        append_ckv=inputs.ckv,
        append_kpe=inputs.kpe,
        batch_indices=batch_indices,
        positions=positions,
        ckv_cache=ckv_cache,
        kpe_cache=kpe_cache,
        kv_indices=keys.indices,
        kv_indptr=keys.indptr.to(device),
        kv_last_page_len=torch.where(keys.kv_lens > 0, (keys.kv_lens - 1) % page_size + 1, 0).int().to(device),
    )
    return _run_function(APPEND, call, inputs.ckv, "AppendPagedKVMlaCacheKernel")


def owners(inputs: WriteInputs, page_size: int) -> tuple[Tensor, Tensor]:
    """The request and the position in it whose slot each new token has, [T] int32 both.

    Tokens that share a slot have one owner. Raises ValueError for a slot that belongs to no request.
    """
    import torch

    from mla_verify.inputs import slots_of

    kv_lens = inputs.kv_lens.tolist()
    slots = [slots_of(inputs.page_table, b, page_size, n) for b, n in enumerate(kv_lens)]
    order = torch.cat(slots).argsort()
    ordered = torch.cat(slots)[order]
    at = torch.searchsorted(ordered, inputs.slots).clamp_max(len(ordered) - 1)
    if not bool((ordered[at] == inputs.slots).all()):
        raise ValueError("a slot belongs to no request, and FlashInfer writes by request and position")
    request = torch.cat([torch.full_like(own, b) for b, own in enumerate(slots)])
    position = torch.cat([torch.arange(len(own), device=own.device) for own in slots])
    return request[order[at]].int(), position[order[at]].int()


def concatenate(inputs: ConcatInputs, k: Tensor) -> str:
    """Write both parts into k [T, 128, 192]. Returns what ran."""
    call = partial(CONCAT.load(), k=k, k_nope=inputs.nope, k_rope=inputs.rope)
    return _run_function(CONCAT, call, k, "ConcatMLAKKernel")
