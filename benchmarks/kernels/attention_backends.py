# SPDX-License-Identifier: Apache-2.0
"""The attention backends of this machine beside each other, and what their plans cost the host.

    python -m benchmarks.kernels.attention_backends [--out FOLDER]

Qwen3-8B's heads, bfloat16, pages of 16. GPU time of a layer: the median replay of a CUDA graph of a few layers,
whose caches together are past the L2, by their number; the device work that a forward does once (FlashInfer's
CSR) is counted apart. Host time: the median of prepare(batch), its synchronisation included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from benchmarks import report
from benchmarks.kernels.ops import (
    DEVICE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    L2_BYTES,
    PAGE,
    Q,
    int32,
    randn,
)
from benchmarks.timing import graph_us

from dflash.attention.paged_csr import PagedCsr
from dflash.attention.select import BACKENDS, choose_backend
from dflash.attention.spec import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    LayerCache,
    Refusal,
)
from dflash.models.decoder import arch_of

SHAPES = [
    *[(reqs, Q, context) for context in (512, 1024, 8192) for reqs in (1, 8, 32)],
    (1, Q, 32768),
    (1, 2048, 0),
    (4, 512, 4096),
]
"""(requests, rows a request, context before them)."""


def run(reqs: int, rows: int, context: int, causal: bool) -> list[dict]:
    """A row for each backend that is here."""
    dtype, seq_len = torch.bfloat16, context + rows
    spec = AttentionSpec(
        arch=arch_of(torch.device(DEVICE)), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        dtype=dtype, kv_dtype=dtype, causal=causal, window=None, query_shape="ragged", kv_block_size=PAGE,
    )  # fmt: skip
    columns = -(-seq_len // PAGE)
    layer_bytes = 2 * reqs * columns * PAGE * KV_HEADS * HEAD_DIM * 2
    num_layers = max(2, min(16, 1 + L2_BYTES // layer_bytes))
    caches = [
        LayerCache(*randn(2, 1 + reqs * columns, PAGE, KV_HEADS, HEAD_DIM))
        for _ in range(num_layers)
    ]
    batch = AttentionBatch(
        positions=torch.zeros(reqs * rows, dtype=torch.int64, device=DEVICE),
        slot_mapping=torch.zeros(reqs * rows, dtype=torch.int64, device=DEVICE),
        block_table=(torch.randperm(reqs * columns, device=DEVICE).int() + 1).view(reqs, columns),
        seq_lens=int32([seq_len] * reqs),
        query_start_loc=int32(range(0, reqs * rows + 1, rows)),
        max_query_len=rows,
        max_seq_len=seq_len,
    )
    query = randn(reqs * rows, HEADS, HEAD_DIM)
    csr = PagedCsr(reqs, columns, PAGE, torch.device(DEVICE))
    csr_us = graph_us(lambda: csr.build(batch))
    answers, figures = choose_backend(spec).answers, []
    for row in BACKENDS:
        if row.name == "sdpa" or isinstance(answers[row.name], Refusal):
            continue
        backend = row.make(spec, torch.device(DEVICE))
        host_us = _host_us(backend, batch)
        forward = _layers(backend, query, caches, batch)
        total = graph_us(forward)
        builds = row.name == "flashinfer" and rows == Q
        layer = (total - csr_us * builds) / num_layers
        figures.append(
            {
                "backend": row.name,
                "reqs": reqs,
                "rows": rows,
                "context": context,
                "causal": causal,
                "layer_us": round(layer, 1),
                "forward_us": round(csr_us, 1) if builds else 0.0,
                "host_us": round(host_us, 1),
            }
        )
    return figures


def _layers(
    backend: AttentionBackend,
    query: torch.Tensor,
    caches: list[LayerCache],
    batch: AttentionBatch,
) -> Callable[[], None]:
    def forward() -> None:
        for cache in caches:
            backend.forward(query, cache, batch, None)

    return forward


def _host_us(backend: AttentionBackend, batch: AttentionBatch) -> float:
    backend.prepare(batch)
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        started = time.perf_counter()
        backend.prepare(batch)
        times.append(time.perf_counter() - started)
    return sorted(times)[7] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder of the result; benchmarks/results by default")
    arguments = parser.parse_args()
    figures = []
    for reqs, rows, context in SHAPES:
        for causal in (True,) if rows > Q else (True, False):
            figures += run(reqs, rows, context, causal)
            torch.cuda.empty_cache()
    for f in figures:
        mask = "causal" if f["causal"] else "non-causal"
        shape = f"{f['reqs']:>2} x {f['rows']:>4} at {f['context']:>5} {mask:10}"
        print(
            f"{shape} {f['backend']:17} {f['layer_us']:8.1f} us a layer {f['forward_us']:6.1f} us a forward "
            f"{f['host_us']:7.1f} us host"
        )
    print(report.write("attention_backends", figures, arguments.out))


if __name__ == "__main__":
    main()
