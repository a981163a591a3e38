"""Paged caches become dense sequences, and nothing that a request does not own is read on the way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_verify.reference.paged import gather_by_indptr, gather_by_page_table, page_table_to_indptr, pages_for

GARBAGE = 2147480000  # what FlashMLA's tests put behind the used entries: an address far outside any cache


def paged(kv_lens: list[int], page_size: int, seed: int = 0, spare_pages: int = 3, width: int = 5):
    """(sequences, cache, page_table, kv_lens): shuffled pages, NaN in every slot that no sequence owns."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randn(n, width, generator=generator) for n in kv_lens]
    used = sum(pages_for(n, page_size) for n in kv_lens)
    cache = torch.full((used + spare_pages, page_size, width), float("nan"))
    free = torch.randperm(len(cache), generator=generator).tolist()
    rows = []
    for sequence in sequences:
        row = [free.pop() for _ in range(pages_for(len(sequence), page_size))]
        for i, page in enumerate(row):
            tokens = sequence[i * page_size : (i + 1) * page_size]
            cache[page, : len(tokens)] = tokens
        rows.append(row)
    max_pages = max(map(len, rows), default=0) + 2
    table = torch.tensor([row + [GARBAGE] * (max_pages - len(row)) for row in rows], dtype=torch.int32)
    return sequences, cache, table.reshape(len(kv_lens), max_pages), torch.tensor(kv_lens, dtype=torch.int32)


@settings(max_examples=60, deadline=None)
@given(
    kv_lens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 2, 3, 16, 64]),
    seed=st.integers(0, 1000),
)
def test_both_ways_give_the_tokens_in_order_and_no_slot_that_is_not_owned(kv_lens, page_size, seed):
    sequences, cache, table, lens = paged(kv_lens, page_size, seed)
    kv_indptr, kv_indices = page_table_to_indptr(table, lens, page_size=page_size, num_pages=len(cache))
    for request, expected in enumerate(sequences):
        # torch.equal is false for any NaN: a slot past kv_len or an unowned page would show.
        assert torch.equal(gather_by_page_table(cache, table, lens, request), expected)
        assert torch.equal(gather_by_indptr(cache, kv_indptr, kv_indices, lens, request), expected)


def test_conversion_counts_pages_and_drops_the_garbage_behind_them():
    table = torch.tensor([[7, 2, 5, GARBAGE], [GARBAGE] * 4, [1, GARBAGE, -1, 9]], dtype=torch.int32)
    kv_indptr, kv_indices = page_table_to_indptr(table, torch.tensor([9, 0, 4]), page_size=4, num_pages=8)
    assert kv_indptr.tolist() == [0, 3, 3, 4]
    assert kv_indices.tolist() == [7, 2, 5, 1]
    assert kv_indptr.dtype == kv_indices.dtype == torch.int32


def test_an_empty_batch_converts_to_no_pages():
    empty = torch.empty(0, 4, dtype=torch.int32)
    kv_indptr, kv_indices = page_table_to_indptr(empty, torch.empty(0), page_size=4, num_pages=8)
    assert kv_indptr.tolist() == [0] and kv_indices.tolist() == []


def test_two_requests_may_share_a_page():
    cache = torch.arange(6.0).reshape(3, 2, 1)
    table = torch.tensor([[2, 0], [2, 1]])
    lens = torch.tensor([4, 3])
    assert gather_by_page_table(cache, table, lens, 0).flatten().tolist() == [4, 5, 0, 1]
    assert gather_by_page_table(cache, table, lens, 1).flatten().tolist() == [4, 5, 2]


def test_a_strided_view_of_a_wider_pool_and_its_dtype_are_kept():
    _, cache, table, lens = paged([5, 7], page_size=4)
    pool = torch.full((len(cache), 4, 9), float("nan"), dtype=torch.bfloat16)
    pool[:, :, 2:7] = cache.bfloat16()
    gathered = gather_by_page_table(pool[:, :, 2:7], table, lens, 1)
    assert gathered.dtype == torch.bfloat16
    assert torch.equal(gathered, gather_by_page_table(cache, table, lens, 1).bfloat16())


@pytest.mark.parametrize("page", [-1, 8, GARBAGE])
def test_a_used_page_id_outside_the_cache_is_an_error_that_says_where(page):
    cache, lens = torch.zeros(8, 4, 2), torch.tensor([4, 9])
    table = torch.tensor([[3, 0, 0], [3, page, 5]])
    expected = rf"page_table\[1\]\[1\] is page {page}, of a cache of 8 pages"
    with pytest.raises(ValueError, match=expected):
        gather_by_page_table(cache, table, lens, 1)
    with pytest.raises(ValueError, match=expected):
        page_table_to_indptr(table, lens, page_size=4, num_pages=8)
    with pytest.raises(ValueError, match=rf"kv_indices\[2\] is page {page}, of a cache of 8 pages"):
        gather_by_indptr(cache, torch.tensor([0, 1, 4]), torch.tensor([3, 3, page, 5]), lens, 1)
    assert len(gather_by_page_table(cache, table, lens, 0)) == 4  # the other request is not affected


def test_a_length_that_the_pages_cannot_hold_is_an_error():
    cache, table = torch.zeros(8, 4, 2), torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match=r"kv_lens\[0\] is 9 and takes 3 pages of size 4, .* 2 entries"):
        gather_by_page_table(cache, table, torch.tensor([9]), 0)
    with pytest.raises(ValueError, match=r"kv_lens\[0\] is -1"):
        gather_by_page_table(cache, table, torch.tensor([-1]), 0)


@pytest.mark.parametrize("kv_len", [4, 9])
def test_page_lists_that_contradict_the_length_are_an_error(kv_len):
    with pytest.raises(ValueError, match=f"request 0 2 pages, but its kv_len {kv_len} takes"):
        gather_by_indptr(
            torch.zeros(8, 4, 2), torch.tensor([0, 2]), torch.tensor([1, 2]), torch.tensor([kv_len]), request=0
        )


@pytest.mark.parametrize("kv_indptr", [[0, 3], [2, 1], [-1, 1]])
def test_a_kv_indptr_outside_kv_indices_is_an_error(kv_indptr):
    with pytest.raises(ValueError, match="of 2 kv_indices"):
        gather_by_indptr(
            torch.zeros(8, 4, 2), torch.tensor(kv_indptr), torch.tensor([1, 2]), torch.tensor([8]), request=0
        )
