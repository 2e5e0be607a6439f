# SPDX-License-Identifier: Apache-2.0
"""A FlashInfer for machines without GPUs: its plan and run as documented, attention from the CSR itself.

FA2 without split-KV reads lengths when it runs, every other plan keeps those it was made for; FA3 leaves NaN
where there are no keys.
"""

import sys
import types

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    copies = False  # a future version that does not keep the tensors it is given

    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
        assert kv_layout == "NHD"
        self.backend = "fa3" if backend == "auto" else backend
        self.num_plans = 0

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert int_workspace_buffer.dtype == torch.uint8

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, *, causal, window_left, sm_scale, q_data_type,
        kv_data_type, disable_split_kv=False,
    ):  # fmt: skip
        self.num_plans += 1
        self.starts = qo_indptr.tolist()
        given = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(t.dtype == torch.int32 for t in given)
        kept = [t.clone() for t in given] if self.copies else given
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = (
            kept
        )
        self.group, self.page_size = num_qo_heads // num_kv_heads, page_size
        self.causal, self.window_left, self.scale = causal, window_left, sm_scale
        self.planned = None if disable_split_kv else self._lengths()

    def _lengths(self):
        pages = self._paged_kv_indptr_buf.diff()
        lens = (pages - 1) * self.page_size + self._paged_kv_last_page_len_buf
        return torch.where(pages > 0, lens, 0).tolist()

    def run(self, q, paged_kv_cache, *, out, enable_pdl):
        assert q.shape[0] == self.starts[-1] and enable_pdl is False
        lens = self._lengths() if self.planned is None else self.planned
        indptr = self._paged_kv_indptr_buf.tolist()
        for r, length in enumerate(lens):
            rows = slice(self.starts[r], self.starts[r + 1])
            if length == 0 and self.backend == "fa3":
                out[rows] = float("nan")
            else:
                out[rows] = self._attend(q[rows], paged_kv_cache, indptr[r], length)
        return out

    def _attend(self, q, caches, first_page, length):
        if length == 0:
            return torch.zeros_like(q)
        pages = self._paged_kv_indices_buf[first_page:][: -(-length // self.page_size)].long()
        key, value = (
            cache[pages].flatten(0, 1)[:length].repeat_interleave(self.group, 1) for cache in caches
        )
        p = torch.arange(length - q.shape[0], length)[:, None]
        k = torch.arange(length)
        visible = torch.ones(q.shape[0], length, dtype=torch.bool)
        if self.causal:
            visible &= k <= p
        if self.window_left >= 0:
            visible &= p - k <= self.window_left
        scores = torch.einsum("qhd,khd->hqk", q.float(), key.float()) * self.scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value.float()).to(q.dtype)


def install(monkeypatch, copies=False):
    """Puts it in FlashInfer's place; returns the wrappers that are made."""
    made = []

    class Recorded(BatchPrefillWithPagedKVCacheWrapper):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.copies = copies
            made.append(self)

    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Recorded
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return made
