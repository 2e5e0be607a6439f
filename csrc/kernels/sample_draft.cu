// SPDX-License-Identifier: Apache-2.0
// Draft tokens from logits rows. scan_kernel: a CTA owns one shard of one row, adds noise, records,
// and leaves the key of its first maximum; finish_kernel: a warp owns one row. Bytes moved:
// num_rows * vocab_size logits read (of rows that sample nothing too), the record written.
// fill_kernel runs only where a record meets d2t: it writes -inf before the scattered logits.
#include "sample_draft.h"

#include "common/overlap.h"
#include "common/shard.h"

namespace dflash {
namespace {

constexpr int kFinishThreads = 128;

int64_t scan_shards(const SampleDraftParams& p) {
  // The shards of a record reach to the end of the target's vocabulary, where they write -inf.
  return num_shards(p.target_vocab_size > p.vocab_size && p.d2t == nullptr ? p.target_vocab_size
                                                                           : p.vocab_size);
}

template <typename T>
__device__ __forceinline__ void store_quads(T* out, int64_t size, int64_t shard, const Quads& q) {
  const bool aligned = quads_are_aligned(out);
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
    const int64_t column = quad_column(shard, g);
    Vec<T, 4> v;
#pragma unroll
    for (int k = 0; k < 4; ++k) v.x[k] = from_float<T>(q.x[g][k]);
    if (aligned && column + 4 <= size) {
      store_vec<4>(out + column, v);
      continue;
    }
    for (int k = 0; k < 4 && column + k < size; ++k) out[column + k] = v.x[k];
  }
}

template <typename T>
__device__ __forceinline__ void scatter_quads(const SampleDraftParams& p, T* out, int64_t shard,
                                              const Quads& q) {
  for (int g = 0; g < kShardQuads; ++g) {
    const int64_t column = quad_column(shard, g);
    for (int k = 0; k < 4 && column + k < p.vocab_size; ++k) {
      const int64_t id = target_id(p, column + k);
      if (is_token(id, p.target_vocab_size)) out[id] = from_float<T>(q.x[g][k]);
    }
  }
}

template <typename T>
__device__ __forceinline__ T* record_row(const SampleDraftParams& p, const DraftRow& r) {
  return static_cast<T*>(p.draft_logits) + r.state * p.draft_logits_strides[0] +
         r.column * p.draft_logits_strides[1];
}

// A sampled row goes on with what was stored, so that the record is what was drawn from.
template <typename T>
__device__ __forceinline__ void record(const SampleDraftParams& p, const DraftRow& r, int64_t shard,
                                       Quads& q) {
  T* out = record_row<T>(p, r);
  if (p.d2t == nullptr) store_quads(out, p.target_vocab_size, shard, q);
  else scatter_quads(p, out, shard, q);
  if (r.greedy) return;
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
#pragma unroll
    for (int k = 0; k < 4; ++k) q.x[g][k] = round_to<T>(q.x[g][k]);
  }
}

__global__ void __launch_bounds__(kShardThreads, 5)
    scan_kernel(const SampleDraftParams p, unsigned shards, uint64_t* keys) {
  const int64_t row = blockIdx.x / shards;
  const int64_t shard = blockIdx.x % shards;
  const LogitsRow logits{element(p.logits, p.dtype, row * p.logits_stride), p.dtype, p.logit_scale};
  Quads q = load_quads(logits, p.vocab_size, shard);  // on their way while the row is looked up
  const DraftRow r = draft_row(p, row);
  if (r.state < 0) return;
  if (p.draft_logits != nullptr) {
    DFLASH_DISPATCH_FLOATING(p.draft_logits_dtype, record<scalar_t>(p, r, shard, q));
  }
  if (!r.greedy) {
    const bool is_verified = p.logits_start_loc != nullptr;
#pragma unroll
    for (int g = 0; g < kShardQuads; ++g) {
      const Philox4 words = target_words(p, r.noise, quad_column(shard, g));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        q.x[g][k] =
            race_score(is_verified, r.temperature, r.inv_temperature, q.x[g][k], words.x[k]);
      }
    }
  }
  const uint64_t key = block_reduce<LargerKey>(best_key(q, shard));
  if (threadIdx.x == 0) keys[blockIdx.x] = key;
}

struct Finish {
  SampleDraftParams p;
  const uint64_t* keys;
  int64_t keys_per_row;
};

__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ Finish f) {
  wait_for_predecessor();
  const SampleDraftParams& p = f.p;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kFinishThreads / 32) + threadIdx.x / 32;
  if (row >= p.num_rows) return;
  const DraftRow r = draft_row(p, row);
  if (r.state < 0) return;
  const uint64_t key =
      reduce_partials<LargerKey>(f.keys + row * f.keys_per_row, f.keys_per_row);
  if (threadIdx.x % 32 == 0) *token_of(p, r, row) = target_id(p, argmax_index(key));
}

__global__ void __launch_bounds__(kShardThreads)
    fill_kernel(const SampleDraftParams p, unsigned shards) {
  const DraftRow r = draft_row(p, blockIdx.x / shards);
  if (r.state < 0) return;
  const float empty = kNegativeInfinity;
  const Quads q{{{empty, empty, empty, empty},
                 {empty, empty, empty, empty},
                 {empty, empty, empty, empty},
                 {empty, empty, empty, empty}}};
  DFLASH_DISPATCH_FLOATING(
      p.draft_logits_dtype,
      store_quads(record_row<scalar_t>(p, r), p.target_vocab_size, blockIdx.x % shards, q));
}

}  // namespace

int64_t sample_draft_scratch_size(const SampleDraftParams& params) {
  return params.num_rows * scan_shards(params) * static_cast<int64_t>(sizeof(uint64_t));
}

cudaError_t launch_sample_draft(const SampleDraftParams& params, cudaStream_t stream) {
  const int64_t shards = scan_shards(params);
  const int64_t fill_shards = num_shards(params.target_vocab_size);
  const int64_t most_shards = shards > fill_shards ? shards : fill_shards;
  if (params.num_rows * most_shards > INT32_MAX) return cudaErrorInvalidConfiguration;
  const unsigned rows = static_cast<unsigned>(params.num_rows);
  uint64_t* keys = static_cast<uint64_t*>(params.scratch);
  if (params.draft_logits != nullptr && params.d2t != nullptr) {
    const unsigned n = static_cast<unsigned>(fill_shards);
    fill_kernel<<<rows * n, kShardThreads, 0, stream>>>(params, n);
  }
  const unsigned n = static_cast<unsigned>(shards);
  scan_kernel<<<rows * n, kShardThreads, 0, stream>>>(params, n, keys);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? launch_finish_sample(params, keys, n, stream) : error;
}

cudaError_t launch_finish_sample(const SampleDraftParams& params, const uint64_t* keys,
                                 int64_t keys_per_row, cudaStream_t stream) {
  constexpr unsigned kRows = kFinishThreads / 32;
  const unsigned rows = static_cast<unsigned>(params.num_rows);
  return launch_overlapped(finish_kernel, dim3((rows + kRows - 1) / kRows), kFinishThreads, 0,
                           stream, Finish{params, keys, keys_per_row});
}

}  // namespace dflash
