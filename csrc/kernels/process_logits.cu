// SPDX-License-Identifier: Apache-2.0
// The logits that the target's tokens are sampled from, in one launch. A cluster of 8 CTAs owns a
// row, a CTA an eighth of its columns, in shared memory (in the output row where they do not fit).
// A row that is not cut is written as it is read. Else each cut (top_k by count, top_p by mass) is
// one histogram of the distances from the maximum, summed over the cluster; the logits of the bin
// in which the kept part ends go to a list that every CTA orders by itself, or, where they are
// many, into histograms of their digits. Where top_k leaves few, the list is all that top_p needs.
// Counts and masses are integers: no order of addition shows. Bytes moved: the logits and the token
// counts once, the output once.
#include "process_logits.h"

#include "common/device.h"
#include "common/logit_cut.h"

namespace dflash {
namespace {

constexpr int kBatch = 4;  // quads that a thread loads at once

struct alignas(16) Shared {
  CutShared cut;
  float warp_max[kRowWarps];
  float max;
  LogitRules rules;
};

// The request that owns the row: the last that starts at or before it. For the whole CTA.
__device__ __forceinline__ int64_t request_of(const ProcessLogitsParams& p, int64_t row) {
  int64_t starts = 0;
  for (int64_t r = 0; r < p.num_reqs; r += kRowThreads) {
    const int64_t req = r + threadIdx.x;
    starts += __syncthreads_count(req < p.num_reqs && p.logits_start_loc[req] <= row);
  }
  return starts - 1;
}

__device__ __forceinline__ void mark(const Slice& slice, const int64_t* ids, int count) {
  for (int k = threadIdx.x; k < count; k += kRowThreads) {
    const int64_t column = ids[k] - slice.begin;
    if (column >= 0 && column < slice.size) {
      atomicOr(&slice.marks[column / 32], 1u << (column % 32));
    }
  }
}

// Rare: kept out of the loop, so that the rules stay in shared memory.
__device__ __noinline__ float listed_logit_of(const LogitRules& rules, int64_t token, float raw) {
  return listed_logit(rules, token, raw);
}

// Processes the slice and returns this thread's maximum. A raw logit is read before it is
// overwritten, by the thread that overwrites it.
template <typename T>
__device__ __forceinline__ float process_slice(const T* raw, const LogitRules& rules,
                                               const Slice& slice) {
  const LogitRules r = rules;
  const bool listed = r.num_bias + r.num_banned + r.num_drafts > 0;
  const int32_t* counts = r.counts == nullptr ? nullptr : r.counts + slice.begin;
  const bool raw_aligned = quads_are_aligned(raw);
  const bool counts_aligned = quads_are_aligned(counts);
  const bool logits_aligned = quads_are_aligned(slice.logits);
  float max = kNegativeInfinity;
  for (int base = 4 * threadIdx.x; base < slice.size; base += 4 * kRowThreads * kBatch) {
    Vec<T, 4> x[kBatch];
    Vec<int32_t, 4> count[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = base + 4 * kRowThreads * b;
      if (i < slice.size) x[b] = load_quad(raw, i, slice.size, raw_aligned);
    }
    if (counts != nullptr) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = base + 4 * kRowThreads * b;
        if (i < slice.size) count[b] = load_quad(counts, i, slice.size, counts_aligned);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = base + 4 * kRowThreads * b;
      if (i >= slice.size) break;
      const uint32_t marked = listed ? slice.marks[i / 32] >> (i % 32) : 0;
      Vec<float, 4> v;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        v.x[k] = marked >> k & 1
                     ? listed_logit_of(rules, slice.begin + i + k, to_float(x[b].x[k]))
                     : ordinary_logit(r, to_float(x[b].x[k]), static_cast<uint32_t>(count[b].x[k]));
        if (i + k < slice.size) max = fmaxf(max, v.x[k]);
      }
      store_quad(slice.logits, i, slice.size, logits_aligned, v);
    }
  }
  return max;
}

// The row's maximum, in every thread of the cluster.
__device__ __forceinline__ float cluster_max(const cg::cluster_group& cluster, Shared& s,
                                             float max) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1)
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask));
  if (threadIdx.x % 32 == 0) s.warp_max[threadIdx.x / 32] = max;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kRowWarps; ++w) max = fmaxf(max, s.warp_max[w]);
    s.max = max;
  }
  sync_cluster(cluster);
#pragma unroll
  for (int q = 0; q < kRowCtas; ++q) max = fmaxf(max, *cluster.map_shared_rank(&s.max, q));
  return max;
}

__device__ __forceinline__ KeptLogits select(const cg::cluster_group& cluster, CutShared& s,
                                             const LogitRules& r, float max, int mass_bits,
                                             const Slice& slice) {
  KeptLogits kept = kept_by_min_p(max, r.min_p);
  if (!(max > kNegativeInfinity)) return kept;
  int turn = 0;
  Cut at{kNegativeInfinity, 0};
  if (r.top_k > 0) {
    at = cut_row(cluster, s, Weight<false>{max, 0, 1.0f}, r.top_k, kept, slice, turn);
    kept.least = at.least;
  }
  if (!(r.top_p < 1.0f)) return kept;
  const Weight<true> mass{max, mass_bits, ldexpf(1.0f, 2 * mass_bits)};
  kept.least = at.listed > 0 ? least_listed(s, mass, kept, at.listed, 0, r.top_p)
                             : cut_row(cluster, s, mass, r.top_p, kept, slice, turn).least;
  return kept;
}

__device__ __forceinline__ void write_kept(const KeptLogits& kept, const Slice& slice, float* out) {
  const bool aligned = quads_are_aligned(slice.logits), out_aligned = quads_are_aligned(out);
  for (int i = 4 * threadIdx.x; i < slice.size; i += 4 * kRowThreads) {
    Vec<float, 4> v = load_quad(slice.logits, i, slice.size, aligned);
#pragma unroll
    for (int k = 0; k < 4; ++k) v.x[k] = kept(v.x[k]) ? v.x[k] : kNegativeInfinity;
    store_quad(out, i, slice.size, out_aligned, v);
  }
}

// How a row is cut among the CTAs of its cluster: a matter of the vocabulary alone.
struct Layout {
  int slice_size;
  int mark_words;
  int mass_bits;
  bool staged;  // the slice is in shared memory

  int64_t bytes() const {
    const int64_t words = mark_words + (staged ? int64_t{slice_size} : 0);
    return static_cast<int64_t>(sizeof(Shared)) + 4 * words;
  }
};

template <typename T>
__global__ void __cluster_dims__(kRowCtas, 1, 1) __launch_bounds__(kRowThreads, 2)
    process_logits_kernel(const ProcessLogitsParams p, const Layout layout) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int64_t row = blockIdx.x / kRowCtas;
  if (row >= p.logits_start_loc[p.num_reqs]) return;
  const int64_t req = request_of(p, row);
  if (req < 0) return;

  Slice slice{};
  slice.begin = static_cast<int64_t>(blockIdx.x % kRowCtas) * layout.slice_size;
  const int64_t columns = p.vocab_size - slice.begin;
  slice.size = static_cast<int>(columns < 0                   ? 0
                                : columns < layout.slice_size ? columns
                                                              : layout.slice_size);
  slice.marks = reinterpret_cast<uint32_t*>(memory + sizeof(Shared));
  for (int k = threadIdx.x; k < layout.mark_words; k += kRowThreads) slice.marks[k] = 0;
  if (threadIdx.x == 0) s.rules = logit_rules(p, row, req);
  __syncthreads();
  if (s.rules.state < 0) return;
  mark(slice, s.rules.bias_ids, s.rules.num_bias);
  mark(slice, s.rules.banned_ids, s.rules.num_banned);
  mark(slice, s.rules.drafts, s.rules.num_drafts);
  __syncthreads();

  const bool selects = s.rules.selects();
  float* out = p.output + row * p.output_stride + slice.begin;
  float* staging = reinterpret_cast<float*>(slice.marks + layout.mark_words);
  slice.logits = selects && layout.staged ? staging : out;
  const T* raw = static_cast<const T*>(p.logits) + row * p.logits_stride + slice.begin;
  const float thread_max = process_slice(raw, s.rules, slice);
  if (!selects) return;

  const cg::cluster_group cluster = cg::this_cluster();
  const float max = cluster_max(cluster, s, thread_max);
  const KeptLogits kept = select(cluster, s.cut, s.rules, max, layout.mass_bits, slice);
  // No CTA may leave while another reads its shared memory.
  __syncthreads();
  cluster.barrier_arrive();
  write_kept(kept, slice, out);
  __syncthreads();
  cluster.barrier_wait();
}

int bit_length(int64_t x) {
  int bits = 0;
  for (; x > 0; x >>= 1) ++bits;
  return bits;
}

Layout make_layout(int64_t vocab_size) {
  const int64_t eighth = (vocab_size + kRowCtas - 1) / kRowCtas;
  const int64_t slice_size = (eighth + 3) / 4 * 4;
  const int mass_bits = 32 - bit_length(slice_size);
  Layout layout{static_cast<int>(slice_size), static_cast<int>((slice_size + 127) / 128 * 4),
                mass_bits < kMaxMassBits ? mass_bits : kMaxMassBits, true};
  layout.staged = layout.bytes() <= device_properties().max_smem_per_block;
  return layout;
}

template <typename T>
cudaError_t launch(const ProcessLogitsParams& p, cudaStream_t stream) {
  const int64_t ctas = p.num_rows * kRowCtas;
  const Layout layout = make_layout(p.vocab_size);
  if (ctas > INT32_MAX || layout.bytes() > device_properties().max_smem_per_block)
    return cudaErrorInvalidConfiguration;
  const int bytes = static_cast<int>(layout.bytes());
  const auto kernel = process_logits_kernel<T>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(ctas), kRowThreads, bytes, stream>>>(p, layout);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_process_logits(const ProcessLogitsParams& params, cudaStream_t stream) {
  DFLASH_DISPATCH_FLOATING(params.dtype, return launch<scalar_t>(params, stream));
  return cudaErrorInvalidValue;
}

}  // namespace dflash
