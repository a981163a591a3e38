"""Ragged attention, with keys and values of every head's own."""

import torch

import flashinfer
from flashinfer.attention import Wrapper, attend, check_int32


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        kv_indptr_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        assert kv_layout == "NHD"
        super().__init__(float_workspace_buffer, backend)

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        **later,
    ):
        check_int32(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        q_data_type = getattr(torch, q_data_type) if isinstance(q_data_type, str) else q_data_type
        self._plan = dict(locals())

    def run(
        self,
        q,
        k,
        v,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        o_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        kv_cache_sf=None,
    ):
        plan = self._plan
        flashinfer.calls.append(("ragged", plan | {"q": q, "k": k, "v": v}))
        self.check_ready(q=q, k=k, v=v, out=out)
        if q.dtype != plan["q_data_type"] or k.dtype != (plan["kv_data_type"] or plan["q_data_type"]):
            raise ValueError("a dtype is not the planned one")
        if (q.shape[2], v.shape[2]) != (plan["head_dim_qk"], plan["head_dim_vo"]):
            raise ValueError("a shape is not the planned one")
        starts, ends = plan["qo_indptr"].tolist(), plan["kv_indptr"].tolist()
        for b in range(len(starts) - 1):
            rows, keys = slice(starts[b], starts[b + 1]), slice(ends[b], ends[b + 1])
            empty = (0.0 if self._backend == "fa2" else None, -49993.0)  # a finite number that stands for -inf
            scale = q.shape[2] ** -0.5 if plan["sm_scale"] is None else plan["sm_scale"]
            result = attend(q[rows], k[keys], v[keys], causal=plan["causal"], sm_scale=scale, empty=empty)
            out[rows], lse[rows] = result[0].to(out.dtype), result[1].float()
        return (out, lse) if return_lse else out
