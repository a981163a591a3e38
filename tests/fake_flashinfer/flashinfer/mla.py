"""Paged attention over the latent cache."""

import math

import torch

import flashinfer
from flashinfer.attention import Wrapper, attend, check_int32


class BatchMLAPagedAttentionWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        super().__init__(float_workspace_buffer, backend)

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        use_profiler=False,
    ):
        check_int32(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        pages = (kv_len_arr + page_size - 1) // page_size
        if not torch.equal(kv_indptr.diff(), pages) or len(kv_indices) != int(kv_indptr[-1]):
            raise AssertionError("kv_indptr, kv_indices and kv_len_arr do not fit each other")
        self._plan = dict(locals())

    def run(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out=None,
        lse=None,
        return_lse=False,
        profiler_buffer=None,
        kv_len=None,
        page_table=None,
        return_lse_base_on_e=False,
        o_scale=None,
        *,
        ckv_scale=None,
        kpe_scale=None,
    ):
        plan = self._plan
        flashinfer.calls.append(
            ("mla", plan | {"ckv_cache": ckv_cache, "kpe_cache": kpe_cache, "q_nope": q_nope, "q_pe": q_pe})
        )
        self.check_ready(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache, out=out)
        if {q_nope.dtype, q_pe.dtype} != {plan["q_data_type"]} or ckv_cache.dtype != plan["kv_data_type"]:
            raise ValueError("a dtype is not the planned one")
        if ckv_cache.shape[1] != plan["page_size"] or out.shape != q_nope.shape or lse.shape != q_nope.shape[:2]:
            raise ValueError("a shape is not the planned one")
        starts, pages = plan["qo_indptr"].tolist(), plan["kv_indptr"].tolist()
        for b, kv_len in enumerate(plan["kv_len_arr"].tolist()):
            rows = slice(starts[b], starts[b + 1])
            own = plan["kv_indices"][pages[b] : pages[b + 1]].long()
            ckv, kpe = (cache[own].flatten(0, 1)[:kv_len] for cache in (ckv_cache, kpe_cache))
            result = attend(
                torch.cat([q_nope[rows], q_pe[rows]], -1),
                torch.cat([ckv, kpe], -1)[:, None],
                ckv[:, None],
                causal=plan["causal"],
                sm_scale=plan["sm_scale"],
                empty=(0.0, -math.inf),
            )
            out[rows], lse[rows] = result[0].to(out.dtype), result[1].float()
        return (out, lse) if return_lse else out
