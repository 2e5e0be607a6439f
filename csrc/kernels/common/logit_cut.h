// SPDX-License-Identifier: Apache-2.0
// How a cluster of CTAs cuts a row of logits: it finds the least logit that is kept where the
// larger ones weigh less than a target. Each level is one histogram of the candidates in every CTA
// and the sum of all in every CTA, so that all decide alike without another word; weights are
// integers, so that no order of addition shows.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "logit_slice.h"

namespace dflash {

namespace cg = cooperative_groups;

inline constexpr int kRowCtas = 8;
inline constexpr int kRowWarps = kRowThreads / 32;
inline constexpr int kListed = kRowThreads;  // the most logits in the list
inline constexpr int kMaxMassBits = 20;  // half of a mass: exp(0) is 2^(2 * bits)
inline constexpr int kThreadBins = kLogitBins / kRowThreads;
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
};

struct CutShared {
  Histogram histograms[2];  // in turns: the other CTAs may still read the last one
  Boundary boundaries[2];
  uint64_t weights[kListed];
  uint32_t list[kListed];  // keys, those of all CTAs
  uint64_t warp_weights[kRowWarps];
  uint32_t least;
  uint32_t num_listed;  // of the cluster, in its first CTA
};

// NOTE: where warps reach a cluster's barrier one by one, a kernel under synccheck stands there for
// good, every second time.
__device__ __forceinline__ void sync_cluster(const cg::cluster_group& cluster) {
  __syncthreads();
  cluster.sync();
}

template <bool kByMass>
__device__ __forceinline__ void clear(CutShared& s, int turn) {
  Histogram& h = s.histograms[turn];
  for (int bin = threadIdx.x; bin < kLogitBins; bin += kRowThreads) {
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
};

__device__ __forceinline__ uint2 pair_at(const uint32_t* bins) {
  return reinterpret_cast<const uint2*>(bins)[threadIdx.x];
}

template <bool kByMass>
__device__ __forceinline__ BinPair sum_bins(const cg::cluster_group& cluster, Histogram& h,
                                            int mass_bits) {
  BinPair sum{};
#pragma unroll
  for (unsigned q = 0; q < kRowCtas; ++q) {
    const Histogram* other = cluster.map_shared_rank(&h, q);
    const uint2 count = pair_at(other->count);
    sum.count[0] += count.x;
    sum.count[1] += count.y;
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

__device__ __forceinline__ Scan scan_bins(CutShared& s, const BinPair& bins) {
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
  for (int w = 0; w < kRowWarps; ++w) {
    const uint64_t weight = s.warp_weights[w];
    scan.before += w < warp ? weight : 0;
    scan.total += weight;
  }
  return scan;
}

// The candidates, few, go to every CTA's list.
__device__ __forceinline__ void list(const cg::cluster_group& cluster, CutShared& s,
                                     const KeptLogits& kept, const Candidates& c,
                                     const Slice& slice) {
  uint32_t* num_listed = cluster.map_shared_rank(&s.num_listed, 0);
  for_each_logit(slice, [&](float x) {
    if (!kept(x) || !c.contain(x)) return;
    const uint32_t place = atomicAdd(num_listed, 1u), key = float_key(x);
#pragma unroll
    for (int q = 0; q < kRowCtas; ++q) cluster.map_shared_rank(s.list, q)[place] = key;
  });
  sync_cluster(cluster);
}

// What the larger logits of a cut must weigh less than: the share p of the mass, k in number.
template <bool kByMass>
__device__ __forceinline__ uint64_t target_of(double amount, uint64_t total) {
  const double target = kByMass ? ceil(amount * static_cast<double>(total)) : amount;
  return target > 1.0 ? static_cast<uint64_t>(target) : 1;  // the maximum is always kept
}

// The least listed logit that is kept. A target of 0 is made from `amount` and the list itself.
template <bool kByMass>
__device__ __forceinline__ float least_listed(CutShared& s, const Weight<kByMass>& weight,
                                              const KeptLogits& kept, uint32_t count,
                                              uint64_t target, double amount) {
  const uint32_t i = threadIdx.x;
  const uint32_t key = i < count ? s.list[i] : 0;
  const bool mine = i < count && kept(float_of_key(key));
  __syncthreads();  // the last answer has been read
  if (i == 0) s.least = 0xffffffffu;
  s.weights[i] = mine ? weight(float_of_key(key)) : 0;
  __syncthreads();
  if (mine) {
    uint64_t larger = 0, total = 0;
    for (uint32_t j = 0; j < count; ++j) {
      total += s.weights[j];
      larger += s.list[j] > key ? s.weights[j] : 0;
    }
    if (target == 0) target = target_of<kByMass>(amount, total);
    if (larger < target) atomicMin(&s.least, key);
  }
  __syncthreads();
  return float_of_key(s.least);
}

struct Cut {
  float least;      // the least logit that is kept
  uint32_t listed;  // > 0: the list holds all that are kept, in so many places
};

// The cut at the least of the kept logits for which the larger ones weigh less than the target.
template <bool kByMass>
__device__ __forceinline__ Cut cut_row(const cg::cluster_group& cluster, CutShared& s,
                                       const Weight<kByMass>& weight, double amount,
                                       const KeptLogits& kept, const Slice& slice, int& turn) {
  Candidates c{kept.max};
  uint64_t target = 0;  // of what is larger among the candidates
  for (;;) {
    Histogram& histogram = s.histograms[turn];
    Boundary& found = s.boundaries[turn];
    clear<kByMass>(s, turn);
    turn ^= 1;
    fill(histogram, weight, kept, c, slice);
    sync_cluster(cluster);
    const BinPair bins = sum_bins<kByMass>(cluster, histogram, weight.mass_bits);
    const Scan scan = scan_bins(s, bins);
    const bool first = c.bin < 0;
    if (first) target = target_of<kByMass>(amount, scan.total);
    uint64_t before = scan.before;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (before < target && target <= before + bins.weight[k]) {
        found = Boundary{before, kThreadBins * static_cast<int>(threadIdx.x) + k, bins.count[k]};
      }
      before += bins.weight[k];
    }
    __syncthreads();
    const Boundary boundary = found;
    if (boundary.bin < 0) return Cut{kept.least, 0};
    c.narrow(boundary.bin);
    c.from_top = !kByMass && first && boundary.before + boundary.count <= kListed;
    uint32_t count = boundary.count;
    if (c.from_top) count += static_cast<uint32_t>(boundary.before);
    else target -= boundary.before;
    if (c.shift == 0) return Cut{float_of_key(c.prefix), 0};
    if (count > kListed) continue;
    list(cluster, s, kept, c, slice);
    return Cut{least_listed(s, weight, kept, count, target, amount), c.from_top ? count : 0};
  }
}

}  // namespace dflash
