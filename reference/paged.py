"""From a paged cache to one dense sequence: the only place where the reference reads a page table.

Two ways to say which pages a request owns:

    page table   page_table [batch, max_pages] + kv_lens [batch]; entries past a request's last page are garbage
    indptr       kv_indptr [batch + 1] + kv_indices [num_used_pages] + kv_lens [batch], where kv_indptr counts pages

In both, token t of a request lies in slot t % page_size of its page t // page_size, and slots past kv_len are garbage.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pages_for(kv_len: int, page_size: int) -> int:
    """How many pages `kv_len` tokens take; the last one may be partly used."""
    return -(-kv_len // page_size)


def gather_by_page_table(cache: Tensor, page_table: Tensor, kv_lens: Tensor, request: int) -> Tensor:
    """The keys of one request, in order.

    cache: [num_pages, page_size, ...], any dtype and strides.  page_table: [batch, max_pages] integers.
    kv_lens: [batch] integers.  request: index into the batch.
    Returns [kv_len, ...], a copy in the cache's dtype and on its device; [0, ...] for an empty request.
    Neither slots past kv_len nor table entries past the last used page are read.
    Raises ValueError for a kv_len that is negative or longer than the table's row, and for a used page id outside
    0 <= id < num_pages.
    """
    kv_len = _kv_len(kv_lens, request)
    pages = _used_row(page_table, kv_len, request, page_size=cache.shape[1])
    _check_pages(pages, cache.shape[0], f"page_table[{request}]", first=0)
    return _gather(cache, pages, kv_len)


def gather_by_indptr(cache: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_lens: Tensor, request: int) -> Tensor:
    """The keys of one request, in order, from the page lists that FlashInfer takes.

    cache: [num_pages, page_size, ...], any dtype and strides.  kv_indptr: [batch + 1] integers that count pages.
    kv_indices: [>= kv_indptr[-1]] page ids.  kv_lens: [batch] integers; they say how full the last page is.
    Returns [kv_len, ...] as `gather_by_page_table` does.
    Raises ValueError when the pages between two kv_indptr entries are not exactly those that kv_len takes (the two
    would describe different sequences), when they lie outside kv_indices, and for a page id outside
    0 <= id < num_pages.
    """
    kv_len = _kv_len(kv_lens, request)
    begin, end = int(kv_indptr[request]), int(kv_indptr[request + 1])
    needed = pages_for(kv_len, cache.shape[1])
    if not 0 <= begin <= end <= len(kv_indices):
        raise ValueError(f"kv_indptr[{request}:{request + 2}] is [{begin}, {end}], of {len(kv_indices)} kv_indices")
    if end - begin != needed:
        raise ValueError(
            f"kv_indptr gives request {request} {end - begin} pages, but its kv_len {kv_len} takes {needed} "
            f"of page size {cache.shape[1]}"
        )
    pages = kv_indices[begin:end]
    _check_pages(pages, cache.shape[0], "kv_indices", first=begin)
    return _gather(cache, pages, kv_len)


def page_table_to_indptr(
    page_table: Tensor, kv_lens: Tensor, *, page_size: int, num_pages: int
) -> tuple[Tensor, Tensor]:
    """The same pages as lists: (kv_indptr [batch + 1], kv_indices [num_used_pages]), int32, on the table's device.

    page_table: [batch, max_pages] integers.  kv_lens: [batch] integers.  num_pages: of the cache, to check ids against.
    Table entries past a request's last used page are dropped unread.
    Raises ValueError as `gather_by_page_table` does.
    """
    used = []
    for request in range(len(kv_lens)):
        pages = _used_row(page_table, _kv_len(kv_lens, request), request, page_size=page_size)
        _check_pages(pages, num_pages, f"page_table[{request}]", first=0)
        used.append(pages.to(torch.int32))
    counts = torch.tensor([0, *(len(pages) for pages in used)], dtype=torch.int32, device=page_table.device)
    # The empty first item keeps torch.cat happy for a batch of none.
    kv_indices = torch.cat([page_table.new_empty(0, dtype=torch.int32), *used])
    return counts.cumsum(0, dtype=torch.int32), kv_indices


def _kv_len(kv_lens: Tensor, request: int) -> int:
    kv_len = int(kv_lens[request])
    if kv_len < 0:
        raise ValueError(f"kv_lens[{request}] is {kv_len}, it must be at least 0")
    return kv_len


def _used_row(page_table: Tensor, kv_len: int, request: int, *, page_size: int) -> Tensor:
    needed, given = pages_for(kv_len, page_size), page_table.shape[1]
    if needed > given:
        raise ValueError(
            f"kv_lens[{request}] is {kv_len} and takes {needed} pages of size {page_size}, "
            f"but page_table[{request}] has {given} entries"
        )
    return page_table[request, :needed]


def _check_pages(pages: Tensor, num_pages: int, name: str, *, first: int) -> None:
    # A negative id would index from the end without a word, hence the check of both sides.
    wrong = ((pages < 0) | (pages >= num_pages)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"{name}[{first + i}] is page {int(pages[i])}, of a cache of {num_pages} pages")


def _gather(cache: Tensor, pages: Tensor, kv_len: int) -> Tensor:
    token = torch.arange(kv_len, device=cache.device)
    page_of_token = pages.to(cache.device, torch.int64)[token // cache.shape[1]]
    # Indexed by (page, slot): nothing but the referenced slots is touched, and a strided pool needs no copy.
    return cache[page_of_token, token % cache.shape[1]]
