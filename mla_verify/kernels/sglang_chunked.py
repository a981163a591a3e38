"""SGLang's chunked prefix with its FlashInfer MLA backend, run by SGLang's own code without a model.

Its own: what is in each chunk (ForwardBatchDeepSeekMHAMixin), planning and calling FlashInfer's ragged attention for
the new keys and for each chunk (FlashInferMLAAttnBackend.forward_extend, FlashInferMhaChunkKVRunner), and which results
are merged, in which order and by which kernel (DeepseekMHAForwardMixin.forward_normal_chunked_kv_core). Ours, in place
of a model: the projections before and after attention do nothing, and keys that the case has expanded already stand for
those that a model expands from its latent cache.

0.5.16 and 0.5.23 hand FlashInfer's LSEs, which are base 2, to a merge that takes natural ones: they fail here.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mla_verify.errors import FallbackError
from mla_verify.kernels.contract import Contract
from mla_verify.kernels.entry import version
from mla_verify.kernels.flashinfer import FlashInferRaggedFA3
from mla_verify.kernels.fresh_memory import fresh_memory_is_nan
from mla_verify.kernels.merge_parts import CHUNK, MORE_QUERIES
from mla_verify.kernels.merges_api import (
    BACKEND_EXTEND,
    CHUNK_LENGTHS,
    CHUNK_RUNNER,
    CHUNKED_FORWARD,
    MERGE_TRITON,
    MERGE_V2,
    sglang_flashinfer_facts,
)
from mla_verify.kernels.sglang_api import NOT_INSTALLED

if TYPE_CHECKING:
    from torch import Tensor

    from mla_verify.cases import CaseSpec
    from mla_verify.tensors import MHAInputs, MLAOutput

_MERGE = "sglang.srt.layers.attention.merge_state"  # where later releases choose between the two


class SGLangFlashInferMerge(FlashInferRaggedFA3):
    """out alone: SGLang needs no LSE of the whole."""

    name = "sglang-flashinfer-merge"
    entries = (*FlashInferRaggedFA3.entries, MERGE_V2, CHUNKED_FORWARD, BACKEND_EXTEND, CHUNK_RUNNER, CHUNK_LENGTHS)
    contract = Contract(
        form="mha",
        dtypes=FlashInferRaggedFA3.contract.dtypes,
        phases=("spec", "prefix", "chunked", "mixed"),
        facts=sglang_flashinfer_facts,
    )
    chunk = CHUNK

    def missing(self) -> str | None:
        from importlib.util import find_spec

        if find_spec("sglang") is None:
            return NOT_INSTALLED
        if find_spec("sgl_kernel") is None:
            return "sgl_kernel is not installed; SGLang's model code also imports what its server needs"
        return super().missing()

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        if any(request.q_len > request.kv_len for request in spec.requests):
            return MORE_QUERIES
        if not spec.causal:
            return "SGLang attends over the new keys causally"
        if all(request.q_len in (0, request.kv_len) for request in spec.requests):
            return "no request has cached keys, and SGLang then takes another way"
        return super().why_not(spec, device)

    def version(self) -> str:
        return f"{version('sglang')}, {version(MERGE_V2.library)}, {super().version()}"

    def run(self, inputs: MHAInputs, out: MLAOutput) -> MLAOutput:
        from mla_verify.kernels.sglang_writes import launches
        from mla_verify.tensors import MLAOutput

        if not len(inputs.q):
            return MLAOutput(out.out, None)
        merged = f"{MERGE_V2.module}.{MERGE_V2.name}"
        watched = [
            (module, entry.name, f"{entry.module}.{entry.name}")
            for module in (import_module(CHUNKED_FORWARD.module), import_module(_MERGE))
            for entry in (MERGE_V2, MERGE_TRITON)
        ]
        with launches(watched) as launched, fresh_memory_is_nan():
            result, backends = chunked_prefix(inputs, self.chunk)
        if set(launched) != {merged}:
            instead = " and ".join(sorted(set(launched))) or "nothing"
            raise FallbackError(f"asked for {merged}, SGLang merged by {instead}")
        # FlashInfer's "auto", as SGLang asks for it; the facts are those of one.
        if backends != [self.backend]:
            raise FallbackError(f"on this GPU FlashInfer takes {self.backend}, and it took {' and '.join(backends)}")
        self._what = (
            f"{CHUNKED_FORWARD.name.split('.')[1]} of {version('sglang')}: FlashInfer ragged, {', '.join(backends)}; "
            f"{len(launched)} chunks merged by {merged}"
        )
        out.out.copy_(result)
        return MLAOutput(out.out, None)


def chunked_prefix(inputs: MHAInputs, chunk: int) -> tuple[Tensor, list[str]]:
    """Attention of all new queries over cached and new keys, [T, H, V], and FlashInfer's backends that ran.

    chunk: cached keys of each request that SGLang attends over at once.
    """
    import torch

    context = import_module("sglang.srt.model_executor.forward_context")
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    # A request without queries is in no batch.
    live = [b for b, q_len in enumerate(inputs.qo_indptr.diff().tolist()) if q_len]
    starts, q_lens = inputs.kv_indptr.tolist(), inputs.qo_indptr.diff().tolist()
    cached = [starts[b + 1] - starts[b] - q_lens[b] for b in live]
    new = [torch.arange(starts[b] + n, starts[b + 1]) for b, n in zip(live, cached, strict=True)]
    at = torch.cat(new).to(inputs.device)
    with parallel.override(attn_tp_size=1, dcp_enabled=False):
        backend = _backend(inputs, [starts[b] for b in live], cached)
        batch = _batch(inputs, [q_lens[b] for b in live], cached, chunk)
        layer = _layer(inputs, backend)
        with context.forward_context(context.ForwardContext(attn_backend=backend)):
            forward = getattr(layer, CHUNKED_FORWARD.name.split(".")[1])
            result = forward(q=inputs.q, k=inputs.k[at], v=inputs.v[at], forward_batch=batch)
    runner = backend.mha_chunk_kv_cache
    wrappers = (runner.ragged_wrapper, *runner.chunk_ragged_wrappers)
    return result.view(-1, inputs.q.shape[1], inputs.v_dim), sorted({str(w._backend) for w in wrappers})


def _backend(inputs: MHAInputs, starts: list[int], cached: list[int]) -> Any:
    """SGLang's backend with what it needs for a chunked prefix, and pools in which slot i is key i of the case."""
    import torch

    from mla_verify.kernels.flashinfer_calls import WORKSPACE_BYTES

    module = import_module(BACKEND_EXTEND.module)
    memory = import_module("sglang.srt.mem_cache.memory_pool")
    device, bs = inputs.device, len(cached)
    nope, rope = inputs.qk_dims
    table = torch.zeros(bs, max(1, *cached), dtype=torch.int32)
    for row, (start, n) in enumerate(zip(starts, cached, strict=True)):
        table[row, :n] = torch.arange(start, start + n)
    # Neither constructor is called: they want a model's runner and the arguments of a server.
    backend = object.__new__(module.FlashInferMLAAttnBackend)
    backend.token_to_kv_pool = object.__new__(type("Pool", (memory.MLATokenToKVPool,), {"__del__": lambda self: None}))
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table.to(device))
    # Slots are what they are: 0.5.23 can translate them.
    backend.kv_index_translator = SimpleNamespace(
        reads_are_translated=False, translate_dcp_read_ids=lambda slots: slots
    )
    backend.enable_chunk_kv = True
    backend.device, backend.page_size = device, 1
    backend.qo_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=device)
    backend.kv_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=device)
    # NaN in every dtype: what is read without having been written must show.
    backend.workspace_buffer = torch.full((WORKSPACE_BYTES,), 0xFF, dtype=torch.uint8, device=device)
    backend.fmha_backend = "auto"
    backend.prefill_wrapper_ragged = module.BatchPrefillWithRaggedKVCacheWrapper(
        backend.workspace_buffer, "NHD", backend=backend.fmha_backend
    )
    dims = SimpleNamespace(
        num_attention_heads=inputs.q.shape[1], qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=inputs.v_dim
    )
    runner = SimpleNamespace(model_config=dims, dtype=inputs.q.dtype)
    backend.mha_chunk_kv_cache = module.FlashInferMhaChunkKVRunner(model_runner=runner, attn_backend=backend)
    return backend


def _batch(inputs: MHAInputs, q_lens: list[int], cached: list[int], chunk: int) -> Any:
    import torch

    mixin = import_module(CHUNK_LENGTHS.module).ForwardBatchDeepSeekMHAMixin
    # The budget of keys that SGLang shares out among the requests of the batch.
    capacity = chunk * len(cached)
    batch = type("Batch", (mixin,), {"get_max_chunk_capacity": lambda self: capacity})()
    batch.batch_size = len(cached)
    batch.req_pool_indices = torch.arange(len(cached), device=inputs.device)
    batch.extend_prefix_lens_cpu = cached
    batch.extend_prefix_lens = torch.tensor(cached, dtype=torch.int32, device=inputs.device)
    batch.extend_seq_lens_cpu = q_lens
    batch.extend_seq_lens = torch.tensor(q_lens, dtype=torch.int32, device=inputs.device)
    batch.seq_lens = (batch.extend_prefix_lens + batch.extend_seq_lens).long()
    batch.attn_dcp_metadata = None
    return batch


def _layer(inputs: MHAInputs, backend: Any) -> Any:
    mixin = import_module(CHUNKED_FORWARD.module).DeepseekMHAForwardMixin
    num_heads, (nope, rope), v_dim = inputs.q.shape[1], inputs.qk_dims, inputs.v_dim

    class Attention:
        """What SGLang's RadixAttention is to its backend."""

        tp_q_head_num = tp_k_head_num = tp_v_head_num = num_heads
        head_dim, v_head_dim = nope + rope, v_dim
        scaling, logit_cap, layer_id = inputs.sm_scale, 0.0, 0

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, save_kv_cache: bool, **options: Any) -> Any:
            return backend.forward_extend(q=q, k=k, v=v, layer=self, forward_batch=batch, save_kv_cache=save_kv_cache)

    class Layer(mixin):  # type: ignore[misc, valid-type]
        num_local_heads, v_head_dim = num_heads, v_dim
        qk_nope_head_dim, qk_rope_head_dim = nope, rope

        def _get_mla_kv_buffer(self, slots: Tensor, dtype: object, batch: object) -> tuple[Tensor, Tensor]:
            """Nope parts and values, side by side as kv_b_proj gives them, and the rope parts."""
            import torch

            k = inputs.k[slots.long()]
            return torch.cat([k[..., :nope], inputs.v[slots.long()]], dim=-1).flatten(1), k[..., nope:]

        def kv_b_proj(self, expanded: Tensor) -> tuple[Tensor]:
            return (expanded,)

        def o_proj(self, attended: Tensor) -> tuple[Tensor, None]:
            return attended, None

    layer = Layer()
    layer.attn_mha = Attention()
    return layer
