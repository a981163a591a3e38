"""The write into the paged latent cache."""

from flashinfer.attention import check_int32


def append_paged_mla_kv_cache(
    append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len
):
    check_int32(
        batch_indices=batch_indices,
        positions=positions,
        kv_indices=kv_indices,
        kv_indptr=kv_indptr,
        kv_last_page_len=kv_last_page_len,
    )
    if (append_ckv.shape[1], append_kpe.shape[1]) != (512, 64):
        raise ValueError("head_dim_ckv must be equal to 512 and head_dim_kpe to 64")
    page_size = ckv_cache.shape[1]
    if not (kv_last_page_len <= page_size).all() or len(kv_indptr) != len(kv_last_page_len) + 1:
        raise ValueError("kv_last_page_len")
    for row, (b, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(kv_indices[int(kv_indptr[b]) + position // page_size])
        ckv_cache[page, position % page_size] = append_ckv[row]
        kpe_cache[page, position % page_size] = append_kpe[row]
