// SPDX-License-Identifier: Apache-2.0
// The logits that the target's tokens are sampled from, in one launch. A cluster of 8 CTAs owns a
// row, a CTA an eighth of its columns, in shared memory (in the output row where they do not fit).
// A row that is not cut is written as it is read. Else each cut (top_k by count, top_p by mass) is
// one histogram of the distances from the maximum, summed over the cluster; the logits of the bin
// in which the kept part ends go to a list that every CTA orders by itself, or, where they are
// many, into histograms of their digits. Counts and masses are integers: no order of addition
// shows. Bytes moved: the logits and the token counts once, the output once.
#include "process_logits.h"

#include <cooperative_groups.h>

#include "common/device.h"
#include "common/vec.h"

namespace dflash {
namespace {

namespace cg = cooperative_groups;

constexpr int kCtas = 8;  // of a row
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 4;           // quads that a thread loads at once
constexpr int kListed = kThreads;   // most logits in the list
constexpr int kDigitBits = 10;      // of a key
constexpr int kMaxMassBits = 20;    // half of a mass: exp(0) is 2^(2 * bits)
constexpr int kThreadBins = kLogitBins / kThreads;
static_assert(kThreadBins == 2 && kLogitBins == 1 << kDigitBits, "a thread owns a pair of bins");

// Masses are summed in halves, so that 32-bit atomics do.
struct Histogram {
  uint32_t count[kLogitBins];
  uint32_t low[kLogitBins];
  uint32_t high[kLogitBins];
};

// The bin in which the kept part ends.
struct Boundary {
  uint64_t before;  // weight of the bins before it
  int bin;          // -1: everything is kept
  uint32_t count;   // logits in the bin
  uint32_t offset;  // those of the CTAs before this one
};

struct alignas(16) Shared {
  Histogram histograms[2];  // in turns: the other CTAs may still read the last one
  Boundary boundaries[2];
  uint64_t weights[kListed];
  uint32_t list[kListed];  // keys, those of all CTAs
  uint64_t warp_weights[kWarps];
  float warp_max[kWarps];
  float max;
  uint32_t least;
  uint32_t num_listed;
  LogitRules rules;
};

// Columns of this CTA and where its processed logits stand.
struct Slice {
  int64_t begin;
  int size;
  uint32_t* marks;  // a bit a column: some list of the row names it
  float* logits;
};

template <typename T>
__device__ __forceinline__ bool quads_are_aligned(const T* x) {
  return reinterpret_cast<uintptr_t>(x) % sizeof(Vec<T, 4>) == 0;
}

template <typename T>
__device__ __forceinline__ Vec<T, 4> load_quad(const T* x, int i, int size, bool aligned) {
  if (aligned && i + 4 <= size) return load_vec<4>(x + i);
  Vec<T, 4> v{};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (i + k < size) v.x[k] = x[i + k];
  }
  return v;
}

__device__ __forceinline__ void store_quad(float* x, int i, int size, bool aligned,
                                           const Vec<float, 4>& v) {
  if (aligned && i + 4 <= size) return store_vec<4>(x + i, v);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (i + k < size) x[i + k] = v.x[k];
  }
}

// fn(x) for this thread's processed logits.
template <typename Fn>
__device__ __forceinline__ void for_each_logit(const Slice& slice, const Fn& fn) {
  const bool aligned = quads_are_aligned(slice.logits);
  for (int i = 4 * threadIdx.x; i < slice.size; i += 4 * kThreads) {
    const Vec<float, 4> v = load_quad(slice.logits, i, slice.size, aligned);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k < slice.size) fn(v.x[k]);
    }
  }
}

// The request that owns the row: the last that starts at or before it. For the whole CTA.
__device__ __forceinline__ int64_t request_of(const ProcessLogitsParams& p, int64_t row) {
  int64_t starts = 0;
  for (int64_t r = 0; r < p.num_reqs; r += kThreads) {
    const int64_t req = r + threadIdx.x;
    starts += __syncthreads_count(req < p.num_reqs && p.logits_start_loc[req] <= row);
  }
  return starts - 1;
}

__device__ __forceinline__ void mark(const Slice& slice, const int64_t* ids, int count) {
  for (int k = threadIdx.x; k < count; k += kThreads) {
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
  for (int base = 4 * threadIdx.x; base < slice.size; base += 4 * kThreads * kBatch) {
    Vec<T, 4> x[kBatch];
    Vec<int32_t, 4> count[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = base + 4 * kThreads * b;
      if (i < slice.size) x[b] = load_quad(raw, i, slice.size, raw_aligned);
    }
    if (counts != nullptr) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = base + 4 * kThreads * b;
        if (i < slice.size) count[b] = load_quad(counts, i, slice.size, counts_aligned);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = base + 4 * kThreads * b;
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
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, s.warp_max[w]);
    s.max = max;
  }
  cluster.sync();
#pragma unroll
  for (int q = 0; q < kCtas; ++q) max = fmaxf(max, *cluster.map_shared_rank(&s.max, q));
  return max;
}

// What a logit weighs in a cut.
template <bool kByMass>
struct Weight {
  float max;
  int mass_bits;
  float scale;  // 2^(2 * mass_bits)

  __device__ uint64_t operator()(float x) const {
    if (!kByMass) return 1;
    return __float2ull_rn(expf(x - max) * scale);
  }
};

// The logits among which the kept part ends: all, those of one bin, or those of it that share the
// digits of their keys above `shift`.
struct Candidates {
  float max;
  int bin = -1;
  int shift = 32;
  uint32_t prefix = 0;

  __device__ int next_shift() const { return shift > kDigitBits ? shift - kDigitBits : 0; }
  __device__ uint32_t digit_mask() const { return (1u << (shift - next_shift())) - 1; }

  __device__ bool contain(float x) const {
    if (bin < 0) return true;
    return logit_bin(max, x) == bin && static_cast<uint64_t>(float_key(x)) >> shift == prefix;
  }

  // Ascending bins hold descending logits.
  __device__ int next_bin(float x) const {
    if (bin < 0) return logit_bin(max, x);
    return static_cast<int>(digit_mask() - (float_key(x) >> next_shift() & digit_mask()));
  }

  __device__ void narrow(int to) {
    if (bin < 0) {
      bin = to;
      return;
    }
    prefix = prefix << (shift - next_shift()) | (digit_mask() - static_cast<uint32_t>(to));
    shift = next_shift();
  }
};

template <bool kByMass>
__device__ __forceinline__ void clear(Shared& s, int turn) {
  Histogram& h = s.histograms[turn];
  for (int bin = threadIdx.x; bin < kLogitBins; bin += kThreads) {
    h.count[bin] = 0;
    if (kByMass) h.low[bin] = h.high[bin] = 0;
  }
  if (threadIdx.x == 0) {
    s.boundaries[turn].bin = -1;
    s.num_listed = 0;
  }
  __syncthreads();
}

template <bool kByMass>
__device__ __forceinline__ void fill(Histogram& h, const Weight<kByMass>& weight,
                                     const KeptLogits& kept, const Candidates& c,
                                     const Slice& slice) {
  uint32_t far = 0;
  for_each_logit(slice, [&](float x) {
    if (!kept(x) || !c.contain(x)) return;
    const int bin = c.next_bin(x);
    // Most of a vocabulary is far from the maximum, in one bin, and without a mass.
    if (c.bin < 0 && bin == kLogitBins - 1) {
      ++far;
      return;
    }
    atomicAdd(&h.count[bin], 1u);
    if (!kByMass) return;
    const uint64_t mass = weight(x);
    if (mass == 0) return;
    atomicAdd(&h.low[bin], static_cast<uint32_t>(mass) & ((1u << weight.mass_bits) - 1));
    atomicAdd(&h.high[bin], static_cast<uint32_t>(mass >> weight.mass_bits));
  });
  far = __reduce_add_sync(0xffffffffu, far);
  if (threadIdx.x % 32 == 0 && far > 0) atomicAdd(&h.count[kLogitBins - 1], far);
}

// This thread's pair of bins, summed over the cluster.
struct BinPair {
  uint64_t weight[2];
  uint32_t count[2];
  uint32_t offset[2];  // counts of the CTAs before this one
};

__device__ __forceinline__ uint2 pair_at(const uint32_t* bins) {
  return reinterpret_cast<const uint2*>(bins)[threadIdx.x];
}

template <bool kByMass>
__device__ __forceinline__ BinPair sum_bins(const cg::cluster_group& cluster, Histogram& h,
                                            int mass_bits) {
  const unsigned rank = cluster.block_rank();
  BinPair sum{};
#pragma unroll
  for (unsigned q = 0; q < kCtas; ++q) {
    const Histogram* other = cluster.map_shared_rank(&h, q);
    const uint2 count = pair_at(other->count);
    sum.count[0] += count.x;
    sum.count[1] += count.y;
    sum.offset[0] += q < rank ? count.x : 0;
    sum.offset[1] += q < rank ? count.y : 0;
    if (!kByMass) continue;
    const uint2 low = pair_at(other->low), high = pair_at(other->high);
    sum.weight[0] += (static_cast<uint64_t>(high.x) << mass_bits) + low.x;
    sum.weight[1] += (static_cast<uint64_t>(high.y) << mass_bits) + low.y;
  }
  if (!kByMass) {
    sum.weight[0] = sum.count[0];
    sum.weight[1] = sum.count[1];
  }
  return sum;
}

struct Scan {
  uint64_t before;  // weight of the bins before this thread's
  uint64_t total;
};

__device__ __forceinline__ Scan scan_bins(Shared& s, const BinPair& bins) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t own = bins.weight[0] + bins.weight[1];
  uint64_t sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) s.warp_weights[warp] = sum;
  __syncthreads();
  Scan scan{sum - own, 0};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint64_t weight = s.warp_weights[w];
    scan.before += w < warp ? weight : 0;
    scan.total += weight;
  }
  return scan;
}

// The candidates, few, go to every CTA's list; each finds the least one that is kept.
template <bool kByMass>
__device__ __forceinline__ float least_listed(const cg::cluster_group& cluster, Shared& s,
                                              const Weight<kByMass>& weight,
                                              const KeptLogits& kept, const Candidates& c,
                                              const Slice& slice, const Boundary& boundary,
                                              uint64_t target) {
  if (threadIdx.x == 0) s.least = 0xffffffffu;
  for_each_logit(slice, [&](float x) {
    if (!kept(x) || !c.contain(x)) return;
    const uint32_t place = boundary.offset + atomicAdd(&s.num_listed, 1u);
    const uint32_t key = float_key(x);
#pragma unroll
    for (int q = 0; q < kCtas; ++q) cluster.map_shared_rank(s.list, q)[place] = key;
  });
  cluster.sync();
  const uint32_t i = threadIdx.x, count = boundary.count;
  if (i < count) s.weights[i] = weight(float_of_key(s.list[i]));
  __syncthreads();
  if (i < count) {
    const uint32_t key = s.list[i];
    uint64_t larger = 0;
    for (uint32_t j = 0; j < count; ++j) larger += s.list[j] > key ? s.weights[j] : 0;
    if (larger < target) atomicMin(&s.least, key);
  }
  __syncthreads();
  return float_of_key(s.least);
}

// The least logit x of the kept ones for which the larger ones weigh less than the target: k, or
// the share p of all their mass. At least the maximum.
template <bool kByMass>
__device__ __forceinline__ float least_kept(const cg::cluster_group& cluster, Shared& s,
                                            const Weight<kByMass>& weight, double amount,
                                            const KeptLogits& kept, const Slice& slice,
                                            int& turn) {
  Candidates c{kept.max};
  uint64_t target = 0;  // what the larger candidates may not reach
  for (;; turn ^= 1) {
    clear<kByMass>(s, turn);
    fill(s.histograms[turn], weight, kept, c, slice);
    cluster.sync();
    const BinPair bins = sum_bins<kByMass>(cluster, s.histograms[turn], weight.mass_bits);
    const Scan scan = scan_bins(s, bins);
    if (c.bin < 0) {
      const double share = kByMass ? ceil(amount * static_cast<double>(scan.total)) : amount;
      target = share > 1.0 ? static_cast<uint64_t>(share) : 1;
    }
    uint64_t before = scan.before;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (before < target && target <= before + bins.weight[k]) {
        s.boundaries[turn] = Boundary{before, kThreadBins * static_cast<int>(threadIdx.x) + k,
                                      bins.count[k], bins.offset[k]};
      }
      before += bins.weight[k];
    }
    __syncthreads();
    const Boundary boundary = s.boundaries[turn];
    if (boundary.bin < 0) break;
    target -= boundary.before;
    c.narrow(boundary.bin);
    if (c.shift == 0) break;
    if (boundary.count > kListed) continue;
    turn ^= 1;
    return least_listed(cluster, s, weight, kept, c, slice, boundary, target);
  }
  turn ^= 1;
  return c.shift == 0 ? float_of_key(c.prefix) : kept.least;
}

__device__ __forceinline__ KeptLogits select(const cg::cluster_group& cluster, Shared& s, float max,
                                             int mass_bits, const Slice& slice) {
  const LogitRules& r = s.rules;
  KeptLogits kept = kept_by_min_p(max, r.min_p);
  if (!(max > kNegativeInfinity)) return kept;
  int turn = 0;
  if (r.top_k > 0) {
    kept.least = least_kept(cluster, s, Weight<false>{max, 0, 1.0f}, r.top_k, kept, slice, turn);
  }
  if (r.top_p < 1.0f) {
    const Weight<true> mass{max, mass_bits, ldexpf(1.0f, 2 * mass_bits)};
    kept.least = least_kept(cluster, s, mass, r.top_p, kept, slice, turn);
  }
  return kept;
}

__device__ __forceinline__ void write_kept(const KeptLogits& kept, const Slice& slice, float* out) {
  const bool aligned = quads_are_aligned(slice.logits), out_aligned = quads_are_aligned(out);
  for (int i = 4 * threadIdx.x; i < slice.size; i += 4 * kThreads) {
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
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads, 2)
    process_logits_kernel(const ProcessLogitsParams p, const Layout layout) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int64_t row = blockIdx.x / kCtas;
  if (row >= p.logits_start_loc[p.num_reqs]) return;
  const int64_t req = request_of(p, row);
  if (req < 0) return;

  Slice slice{};
  slice.begin = static_cast<int64_t>(blockIdx.x % kCtas) * layout.slice_size;
  const int64_t columns = p.vocab_size - slice.begin;
  slice.size = static_cast<int>(columns < 0                   ? 0
                                : columns < layout.slice_size ? columns
                                                              : layout.slice_size);
  slice.marks = reinterpret_cast<uint32_t*>(memory + sizeof(Shared));
  for (int k = threadIdx.x; k < layout.mark_words; k += kThreads) slice.marks[k] = 0;
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
  const KeptLogits kept = select(cluster, s, max, layout.mass_bits, slice);
  // No CTA may leave while another reads its shared memory.
  cluster.barrier_arrive();
  write_kept(kept, slice, out);
  cluster.barrier_wait();
}

int bit_length(int64_t x) {
  int bits = 0;
  for (; x > 0; x >>= 1) ++bits;
  return bits;
}

Layout make_layout(int64_t vocab_size) {
  const int64_t eighth = (vocab_size + kCtas - 1) / kCtas;
  const int64_t slice_size = (eighth + 3) / 4 * 4;
  const int mass_bits = 32 - bit_length(slice_size);
  Layout layout{static_cast<int>(slice_size), static_cast<int>((slice_size + 127) / 128 * 4),
                mass_bits < kMaxMassBits ? mass_bits : kMaxMassBits, true};
  layout.staged = layout.bytes() <= device_properties().max_smem_per_block;
  return layout;
}

template <typename T>
cudaError_t launch(const ProcessLogitsParams& p, cudaStream_t stream) {
  const int64_t ctas = p.num_rows * kCtas;
  const Layout layout = make_layout(p.vocab_size);
  if (ctas > INT32_MAX || layout.bytes() > device_properties().max_smem_per_block)
    return cudaErrorInvalidConfiguration;
  const int bytes = static_cast<int>(layout.bytes());
  const auto kernel = process_logits_kernel<T>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(ctas), kThreads, bytes, stream>>>(p, layout);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_process_logits(const ProcessLogitsParams& params, cudaStream_t stream) {
  DFLASH_DISPATCH_FLOATING(params.dtype, return launch<scalar_t>(params, stream));
  return cudaErrorInvalidValue;
}

}  // namespace dflash
