# SPDX-License-Identifier: Apache-2.0
"""A batch's block tables as CSR (indptr, indices, last page's length), built on the device at fixed addresses."""

from __future__ import annotations

import torch

from dflash.attention.spec import AttentionBatch


class PagedCsr:
    """int32 buffers for up to max_reqs requests of max_blocks blocks."""

    def __init__(
        self, max_reqs: int, max_blocks: int, kv_block_size: int, device: torch.device
    ) -> None:
        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.indptr = zeros(max_reqs + 1)
        self.indices = zeros(max_reqs * max_blocks + 1)  # the last takes what is no page
        self.last_page_len = zeros(max_reqs)
        self._columns = torch.arange(max_blocks, device=device)
        self._kv_block_size = kv_block_size

    def fits(self, reqs: int, blocks: int) -> bool:
        """Whether a batch of that size can be built here."""
        return reqs <= self.last_page_len.shape[0] and blocks <= self._columns.shape[0]

    def views(self, reqs: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """indptr [R + 1], indices [R * blocks], last_page_len [R]."""
        return (
            self.indptr[: reqs + 1],
            self.indices[: reqs * blocks],
            self.last_page_len[:reqs],
        )

    def fill(self, reqs: int, blocks: int) -> None:
        """The largest batch of that size: every page full, all of them the null block."""
        ends = torch.arange(reqs + 1, dtype=torch.int32, device=self.indptr.device)
        self.indptr[: reqs + 1] = ends * blocks
        self.indices.zero_()
        self.last_page_len.fill_(self._kv_block_size)

    def build(self, batch: AttentionBatch) -> None:
        """The pages that seq_lens reach, bounded by the table; a request of length 0 has none."""
        (reqs, blocks), size = batch.block_table.shape, self._kv_block_size
        rounded = batch.seq_lens.clamp(max=blocks * size) + (size - 1)
        pages = rounded // size
        torch.cumsum(pages, 0, dtype=torch.int32, out=self.indptr[1 : reqs + 1])
        torch.sub(rounded, pages, alpha=size, out=self.last_page_len[:reqs]).add_(1)
        columns = self._columns[:blocks]
        places = self.indptr[:reqs, None] + columns  # [R, blocks]
        places.masked_fill_(columns >= pages[:, None], self.indices.shape[0] - 1)
        self.indices.scatter_(0, places.flatten(), batch.block_table.flatten())
