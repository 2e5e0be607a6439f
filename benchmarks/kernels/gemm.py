# SPDX-License-Identifier: Apache-2.0
"""The streaming GEMM beside the library's (cuBLAS) at the step's shapes, 1 to 128 rows; gate_up to 512 too.

    python -m benchmarks.kernels.gemm [--out FOLDER]

Microseconds a product in a CUDA graph of products over weights rotated past the L2, median of the replays, both
kinds in one process by turns. The floor is the weight's bytes at 4.3 TB/s or the multiplications at 790 TFLOP/s.
`fp8` is the same product with e4m3 weights (linear_fp8), of gate_up with SwiGLU, `fp8 floor` that of half the bytes; a
head has none. At 256 and 512 rows `us` is the library's too; `fused_us` is ours.
`plan` is what `linear_plan` says: [rows, warpgroups, splits], nothing where the library serves.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from benchmarks import report
from benchmarks.kernels.ops import BYTES_PER_US, DEVICE, FLOPS_PER_US, L2_BYTES, randn
from benchmarks.timing import captured, median_us

from dflash.ops.linear import linear, linear_plan
from dflash.ops.linear_fp8 import linear_fp8, pack_fp8, quantize_fp8
from dflash.ops.linear_silu_mul import linear_silu_mul
from dflash.ops.linear_silu_mul_fp8 import linear_silu_mul_fp8
from dflash.ops.silu_mul import silu_mul

LAYER = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
}
"""Outputs and inputs of a Qwen3-8B layer's matrices."""

OTHERS = {
    "head": (151936, 4096),
    "fc": (4096, 20480),
    "demo qkv": (960, 576),
    "demo o": (576, 576),
    "demo gate_up": (3072, 576),
    "demo down": (576, 1536),
    "demo head": (49152, 576),
}
ROWS = (1, 16, 32, 64, 128)
MORE_ROWS = {"gate_up": (256, 512)}
MAX_COPIES = 24
GRAPH_US = 1500


def fp8_products(
    name: str, weights: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor, count: int
) -> list[Callable[[], torch.Tensor]]:
    """The products with e4m3 weights, twice as many copies of half the size."""
    packed = []
    for weight in [*weights, *(weight.flip(0) for weight in weights)]:
        rounded, scale = quantize_fp8(weight)
        packed.append((pack_fp8(rounded), scale))
    turns = [packed[i % len(packed)] for i in range(count)]
    if name.endswith("gate_up"):
        half = y[:, : y.shape[1] // 2].contiguous()
        return [lambda w=w: linear_silu_mul_fp8(x, *w, half) for w in turns]
    return [lambda w=w: linear_fp8(x, *w, None, y) for w in turns]


def measure(name: str, outputs: int, size: int, rows: int, replays: int) -> dict:
    moved = 2 * outputs * size
    copies = int(min(MAX_COPIES, max(3, 4 * L2_BYTES // moved)))
    weights = [randn(outputs, size) for _ in range(copies)]
    x, y = randn(rows, size), torch.empty(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
    # Long enough that the start of a replay does not count.
    multiplied = 2.0 * rows * outputs * size / FLOPS_PER_US
    floor = max(moved / BYTES_PER_US, multiplied)
    turns = weights * math.ceil(GRAPH_US / (copies * (floor + 2)))
    graphs = {
        "us": captured([lambda w=w: linear(x, w, None, y) for w in turns]),
        "library_us": captured([lambda w=w: torch.mm(x, w.T, out=y) for w in turns]),
    }
    if name.endswith("gate_up"):
        half = y[:, : outputs // 2].contiguous()
        graphs["fused_us"] = captured([lambda w=w: linear_silu_mul(x, w, half) for w in turns])
        graphs["library_and_silu_mul_us"] = captured(
            [lambda w=w: silu_mul(torch.mm(x, w.T, out=y), half) for w in turns]
        )
    if not name.endswith("head"):
        graphs["fp8_us"] = captured(fp8_products(name, weights, x, y, len(turns)))
    times = median_us(graphs, len(turns), replays)
    return {
        "matrix": name,
        "outputs": outputs,
        "size": size,
        "rows": rows,
        "plan": linear_plan(x, weights[0]),
        "floor_us": round(floor, 2),
        "fp8_floor_us": round(max(moved / 2 / BYTES_PER_US, multiplied), 2),
        **{kind: round(us, 2) for kind, us in times.items()},
        "share_of_floor": round(floor / times["us"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None)
    parser.add_argument("--replays", type=int, default=11)
    args = parser.parse_args()
    figures = []
    columns = ("floor_us", "us", "library_us", "fused_us", "fp8_floor_us", "fp8_us")
    heads = (column.removesuffix("_us").replace("_", " ") for column in columns)
    print(f"{'matrix':14} {'rows':>4}" + "".join(f" {head:>9}" for head in heads))
    for name, (outputs, size) in (LAYER | OTHERS).items():
        for rows in ROWS + MORE_ROWS.get(name, ()):
            row = measure(name, outputs, size, rows, args.replays)
            figures.append(row)
            line = "".join(f" {row.get(key, ''):>9}" for key in columns)
            print(f"{name:14} {rows:4}{line}", flush=True)
    for rows in ROWS:
        layer = [row for row in figures if row["matrix"] in LAYER and row["rows"] == rows]
        ours = sum(row.get("fused_us", row["us"]) for row in layer)
        library = sum(row.get("library_and_silu_mul_us", row["library_us"]) for row in layer)
        fp8, fp8_floor = (sum(row[key] for row in layer) for key in ("fp8_us", "fp8_floor_us"))
        print(
            f"a layer with SwiGLU at {rows} rows: {ours:.1f} us, the library {library:.1f} us, "
            f"fp8 {fp8:.1f} us (floor {fp8_floor:.1f})"
        )
    print(report.write("gemm", figures, args.out))


if __name__ == "__main__":
    main()
