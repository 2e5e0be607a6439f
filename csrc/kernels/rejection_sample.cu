// SPDX-License-Identifier: Apache-2.0
// Accept drafts and choose the next token. scan_kernel: a CTA owns one shard of one logits row and
// leaves either the key of its first maximum (argmax or Gumbel-max) or the softmax parts of p and
// q. finish_kernel: a CTA owns one request. "match", "synthetic": these two. "standard" adds
// accept_kernel (a CTA a request: which draft fails) and residual_kernel (a CTA a shard of the
// failed row); "block" with draft logits adds excess_kernel (a CTA a shard of each row) and
// block_kernel (a CTA a request). Bytes moved: the logits once; the failed rows twice, "block"
// every row twice. With target_tokens finish_kernel alone.
#include "rejection_sample.h"

#include "common/overlap.h"
#include "common/shard.h"

namespace dflash {
namespace {

constexpr int kRequestThreads = 128;
constexpr int kRequestWarps = kRequestThreads / 32;

// Parts of p and q of one shard.
struct alignas(16) PairParts {
  MaxSum p, q;
};

struct alignas(16) PairSoftmax {
  Softmax p, q;
};

struct Scratch {
  PairSoftmax* softmax;  // [num_reqs, max_rows]
  PairParts* parts;      // [num_reqs, max_rows, shards]
  uint64_t*
      keys;  // [num_reqs, max_rows, shards]; row `accepted` ends as the keys of the emitted token
  float* excess;  // [num_reqs, max_rows, shards]
  float* path;    // [num_reqs, max_rows], P_i
  int* accepted;  // [num_reqs], of sampled requests
  unsigned max_rows;
  unsigned shards;
};

DFLASH_HOST_DEVICE bool uses_softmax(const RejectionSampleParams& p) {
  return p.max_drafts > 0 &&
         (p.method == RejectionMethod::kStandard || p.method == RejectionMethod::kBlock);
}

bool uses_excess(const RejectionSampleParams& p) {
  return uses_softmax(p) && p.method == RejectionMethod::kBlock && p.draft_logits != nullptr;
}

// Cuts `base` into the arrays above and returns the bytes used.
int64_t carve(const RejectionSampleParams& p, void* base, Scratch& s) {
  s = Scratch{};
  s.max_rows = static_cast<unsigned>(p.max_drafts) + 1;
  s.shards = static_cast<unsigned>(num_shards(p.vocab_size));
  const int64_t rows = p.num_reqs * s.max_rows;
  if (p.target_tokens != nullptr) return 0;
  int64_t offset = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(static_cast<char*>(base) + offset);
    offset += count * static_cast<int64_t>(sizeof(T));
  };
  if (uses_softmax(p)) {
    take(s.softmax, rows);
    take(s.parts, rows * s.shards);
  }
  take(s.keys, rows * s.shards);
  if (uses_excess(p)) take(s.excess, rows * s.shards);
  if (uses_softmax(p)) {
    take(s.path, rows);
    take(s.accepted, p.num_reqs);
  }
  return offset;
}

// What a CTA of a kernel over (request, row, shard) owns.
struct RowShard {
  int64_t req;
  int64_t row;  // of [num_reqs, max_rows]
  int i;        // row of the request
  int64_t shard;
};

__device__ __forceinline__ RowShard row_shard(const Scratch& s) {
  const unsigned row = blockIdx.x / s.shards;
  return RowShard{row / s.max_rows, row, static_cast<int>(row % s.max_rows), blockIdx.x % s.shards};
}

// Smallest i < count for which test(i) holds, else count; for a whole warp.
template <typename Test>
__device__ __forceinline__ int first_where(int count, Test test) {
  for (int base = 0; base < count; base += 32) {
    const int i = base + static_cast<int>(threadIdx.x % 32);
    const unsigned hits = __ballot_sync(0xffffffffu, i < count && test(i));
    if (hits != 0) return base + __ffs(static_cast<int>(hits)) - 1;
  }
  return count;
}

// The request with its block cut at the first id that is no token; for a whole warp.
__device__ __forceinline__ VerifiedRequest load_request(const RejectionSampleParams& p,
                                                        int64_t req) {
  VerifiedRequest r = verified_request(p, req);
  r.num_drafts =
      first_where(r.num_drafts, [&](int i) { return !is_token(r.drafts[i], p.vocab_size); });
  return r;
}

__device__ __forceinline__ bool commits_nothing(const RejectionSampleParams& p,
                                                const VerifiedRequest& r) {
  return commit_limit(p, r, 0) == 0;
}

__device__ __forceinline__ bool is_verified_by_softmax(const RejectionSampleParams& p,
                                                       const VerifiedRequest& r) {
  return r.sampled() && uses_softmax(p);
}

__device__ __forceinline__ int synthetic_accepted(const RejectionSampleParams& p,
                                                  const VerifiedRequest& r) {
  return first_where(r.num_drafts, [&](int i) {
    return !accepts_synthetic(acceptance_uniform(r, i), p.synthetic_rates[i]);
  });
}

__device__ __forceinline__ void choose(const RejectionSampleParams& p, const VerifiedRequest& r,
                                       int i, int64_t shard, uint64_t* key_out) {
  Quads q = load_quads(target_row(p, r, i), p.vocab_size, shard);
  if (r.sampled()) {
    const NoiseKey noise = row_noise(p, r, i);
#pragma unroll
    for (int g = 0; g < kShardQuads; ++g) {
      const Philox4 words = stream_words(noise, static_cast<uint32_t>(quad_column(shard, g) / 4));
#pragma unroll
      for (int k = 0; k < 4; ++k) q.x[g][k] += gumbel_from_word(words.x[k]);
    }
  }
  const uint64_t key = block_reduce<LargerKey>(best_key(q, shard));
  if (threadIdx.x == 0) *key_out = key;
}

// Of this shard, in the first warp.
__device__ __forceinline__ MaxSum max_sum(const LogitsRow& row, int64_t vocab_size, int64_t shard) {
  const Quads q = load_quads(row, vocab_size, shard);
  MaxSum m = MergedMaxSum::kIdentity;
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
#pragma unroll
    for (int k = 0; k < 4; ++k) m.max = fmaxf(m.max, q.x[g][k]);
  }
  const float origin = softmax_origin(m.max);
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
#pragma unroll
    for (int k = 0; k < 4; ++k) m.sum += expf(q.x[g][k] - origin);
  }
  return block_reduce<MergedMaxSum>(m);
}

__global__ void __launch_bounds__(kShardThreads)
    scan_kernel(const RejectionSampleParams p, const Scratch s) {
  const auto [req, row, i, shard] = row_shard(s);
  const VerifiedRequest r = load_request(p, req);
  if (commits_nothing(p, r) || i > r.num_drafts) return;
  if (p.method == RejectionMethod::kSynthetic && i != synthetic_accepted(p, r)) return;
  if (i == r.num_drafts || !is_verified_by_softmax(p, r))
    return choose(p, r, i, shard, s.keys + blockIdx.x);

  PairParts parts{};
  parts.p = max_sum(target_row(p, r, i), p.vocab_size, shard);
  if (p.draft_logits != nullptr) parts.q = max_sum(drafter_row(p, r, i), p.vocab_size, shard);
  if (threadIdx.x == 0) s.parts[blockIdx.x] = parts;
}

struct MergedPairParts {
  static constexpr PairParts kIdentity = {MergedMaxSum::kIdentity, MergedMaxSum::kIdentity};
  __device__ static PairParts combine(PairParts a, PairParts b) {
    return PairParts{MergedMaxSum::combine(a.p, b.p), MergedMaxSum::combine(a.q, b.q)};
  }
};

__device__ __forceinline__ Softmax to_softmax(MaxSum m) {
  return Softmax{softmax_origin(m.max), m.sum > 0.0f ? 1.0f / m.sum : 0.0f};
}

__device__ __forceinline__ float probability(float logit, const Softmax& s) {
  return expf(logit - s.max) * s.inv_sum;
}

// Whether and where the block may end, from P_1 .. P_n and the excess after each draft but the
// last: Sun et al.
template <typename Excess>
__device__ __forceinline__ int last_ending(const VerifiedRequest& r, const float* path,
                                           Excess excess) {
  const int n = r.num_drafts;
  // Counted from the back, the last ending is the first.
  return n - first_where(n, [&](int back) {
           const int i = n - back;
           const float threshold = i == n ? path[n] : block_threshold(path[i], excess(i));
           return acceptance_uniform(r, i - 1) < threshold;
         });
}

__global__ void __launch_bounds__(kRequestThreads)
    accept_kernel(const RejectionSampleParams p, const Scratch s) {
  extern __shared__ float shared[];
  float* p_draft = shared;                // [max_rows]
  float* q_draft = p_draft + s.max_rows;  // [max_rows]
  const int64_t req = blockIdx.x;
  const VerifiedRequest r = load_request(p, req);
  if (commits_nothing(p, r) || !is_verified_by_softmax(p, r)) return;
  const int n = r.num_drafts;
  const int warp = static_cast<int>(threadIdx.x / 32);
  for (int i = warp; i < n; i += kRequestWarps) {
    const int64_t row = req * s.max_rows + i;
    PairParts parts = MergedPairParts::kIdentity;
    for (int64_t k = threadIdx.x % 32; k < s.shards; k += 32) {
      parts = MergedPairParts::combine(parts, s.parts[row * s.shards + k]);
    }
    const PairSoftmax softmax{to_softmax(warp_reduce<MergedMaxSum>(parts.p)),
                              to_softmax(warp_reduce<MergedMaxSum>(parts.q))};
    if (threadIdx.x % 32 != 0) continue;
    s.softmax[row] = softmax;
    p_draft[i] = probability(logit_at(target_row(p, r, i), r.drafts[i]), softmax.p);
    q_draft[i] = p.draft_logits == nullptr
                     ? 1.0f
                     : probability(logit_at(drafter_row(p, r, i), r.drafts[i]), softmax.q);
  }
  __syncthreads();
  if (warp != 0) return;

  if (p.method == RejectionMethod::kStandard) {
    const int accepted = first_where(n, [&](int i) {
      return !accepts_standard(acceptance_uniform(r, i), p_draft[i], q_draft[i]);
    });
    if (threadIdx.x == 0) s.accepted[req] = accepted;
    return;
  }
  float* path = s.path + req * s.max_rows;
  if (threadIdx.x == 0) {
    float product = 1.0f;
    path[0] = product;
    for (int i = 0; i < n; ++i) path[i + 1] = product = block_path(product, p_draft[i], q_draft[i]);
  }
  __syncwarp();
  if (p.draft_logits != nullptr) return;
  const int accepted =
      last_ending(r, path, [&](int i) { return one_hot_excess(path[i], p_draft[i]); });
  if (threadIdx.x == 0) s.accepted[req] = accepted;
}

// p and q of this thread's columns of row i, whose softmax is known.
struct PairQuads {
  Quads p, q;
};

__device__ __forceinline__ Quads to_probabilities(Quads q, const Softmax& s) {
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
#pragma unroll
    for (int k = 0; k < 4; ++k) q.x[g][k] = probability(q.x[g][k], s);
  }
  return q;
}

__device__ __forceinline__ PairQuads load_pair(const RejectionSampleParams& p,
                                               const VerifiedRequest& r, int i,
                                               const PairSoftmax& softmax, int64_t shard) {
  PairQuads pair;
  pair.p = to_probabilities(load_quads(target_row(p, r, i), p.vocab_size, shard), softmax.p);
  if (p.draft_logits != nullptr) {
    pair.q = to_probabilities(load_quads(drafter_row(p, r, i), p.vocab_size, shard), softmax.q);
    return pair;
  }
  const int64_t draft = r.drafts[i];
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
#pragma unroll
    for (int k = 0; k < 4; ++k) pair.q.x[g][k] = quad_column(shard, g) + k == draft ? 1.0f : 0.0f;
  }
  return pair;
}

// Sum of max(P_i p - q, 0) over a shard of row i, 1 <= i < num_drafts.
__global__ void __launch_bounds__(kShardThreads)
    excess_kernel(const RejectionSampleParams p, const Scratch s) {
  const auto [req, row, i, shard] = row_shard(s);
  const VerifiedRequest r = load_request(p, req);
  if (commits_nothing(p, r) || !is_verified_by_softmax(p, r) || i == 0 || i >= r.num_drafts) return;
  const PairQuads pair = load_pair(p, r, i, s.softmax[row], shard);
  const float path = s.path[row];
  float sum = 0.0f;
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += residual_weight(path, pair.p.x[g][k], pair.q.x[g][k]);
  }
  sum = block_reduce<SumOf>(sum);
  if (threadIdx.x == 0) s.excess[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kRequestThreads)
    block_kernel(const RejectionSampleParams p, const Scratch s) {
  extern __shared__ float excess[];  // [max_rows]
  const int64_t req = blockIdx.x;
  const VerifiedRequest r = load_request(p, req);
  if (commits_nothing(p, r) || !is_verified_by_softmax(p, r)) return;
  const int warp = static_cast<int>(threadIdx.x / 32);
  for (int i = 1 + warp; i < r.num_drafts; i += kRequestWarps) {
    const float sum =
        reduce_partials<SumOf>(s.excess + (req * s.max_rows + i) * s.shards, s.shards);
    if (threadIdx.x % 32 == 0) excess[i] = sum;
  }
  __syncthreads();
  if (warp != 0) return;
  const int accepted = last_ending(r, s.path + req * s.max_rows, [&](int i) { return excess[i]; });
  if (threadIdx.x == 0) s.accepted[req] = accepted;
}

// Keys of the residual of the row whose draft failed.
__global__ void __launch_bounds__(kShardThreads)
    residual_kernel(const RejectionSampleParams p, const Scratch s) {
  const int64_t req = blockIdx.x / s.shards;
  const int64_t shard = blockIdx.x % s.shards;
  const VerifiedRequest r = load_request(p, req);
  if (commits_nothing(p, r) || !is_verified_by_softmax(p, r)) return;
  const int i = s.accepted[req];
  if (i == r.num_drafts) return;
  const int64_t row = req * s.max_rows + i;
  const PairQuads pair = load_pair(p, r, i, s.softmax[row], shard);
  const float path = p.method == RejectionMethod::kBlock ? s.path[row] : 1.0f;
  const NoiseKey noise = block_noise(Stream::kResidual, r.seed, r.anchor, i);
  Quads scores;
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
    const int64_t column = quad_column(shard, g);
    const Philox4 words = stream_words(noise, static_cast<uint32_t>(column / 4));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float weight = residual_weight(path, pair.p.x[g][k], pair.q.x[g][k]);
      scores.x[g][k] = residual_score(weight, pair.p.x[g][k], exponential_from_word(words.x[k]));
    }
  }
  const uint64_t key = block_reduce<LargerKey>(best_key(scores, shard));
  if (threadIdx.x == 0) s.keys[row * s.shards + shard] = key;
}

// Of a whole warp.
__device__ __forceinline__ void commit(const RejectionSampleParams& p, const VerifiedRequest& r,
                                       int accepted, int64_t token, int64_t req) {
  const auto token_at = [&](int i) { return i < accepted ? r.drafts[i] : token; };
  const int limit = commit_limit(p, r, accepted);
  const int stop =
      first_where(limit, [&](int i) { return is_stop_token(p, r.state, token_at(i)); });
  const int n = stop < limit ? stop + 1 : limit;
  int64_t* tokens = p.sampled_token_ids + req * p.sampled_token_ids_stride;
  for (int i = static_cast<int>(threadIdx.x); i <= p.max_drafts; i += 32)
    tokens[i] = i < n ? token_at(i) : -1;
  if (threadIdx.x != 0) return;
  p.num_sampled[req] = n;
  p.num_rejected[req] = r.num_rows - n;
}

struct Finish {
  RejectionSampleParams p;
  Scratch s;
};

__global__ void __launch_bounds__(kRequestThreads)
    finish_kernel(const __grid_constant__ Finish f) {
  extern __shared__ int64_t choices[];  // [max_rows]
  wait_for_predecessor();
  const RejectionSampleParams& p = f.p;
  const Scratch& s = f.s;
  const int64_t req = blockIdx.x;
  const VerifiedRequest r = load_request(p, req);
  const uint64_t* keys = s.keys + req * s.max_rows * s.shards;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const auto choice = [&](int i) {
    if (p.target_tokens != nullptr) return p.target_tokens[r.first_row + i];
    return argmax_index(reduce_partials<LargerKey>(keys + i * s.shards, s.shards));
  };
  if (commits_nothing(p, r)) {
    if (warp == 0) commit(p, r, 0, -1, req);
    return;
  }
  if (p.method == RejectionMethod::kSynthetic || is_verified_by_softmax(p, r)) {
    if (warp != 0) return;
    const int accepted =
        p.method == RejectionMethod::kSynthetic ? synthetic_accepted(p, r) : s.accepted[req];
    return commit(p, r, accepted, choice(accepted), req);
  }
  for (int i = warp; i <= r.num_drafts; i += kRequestWarps) {
    const int64_t token = choice(i);
    if (threadIdx.x % 32 == 0) choices[i] = token;
  }
  __syncthreads();
  if (warp != 0) return;
  const int accepted = first_where(r.num_drafts, [&](int i) { return r.drafts[i] != choices[i]; });
  commit(p, r, accepted, choices[accepted], req);
}

}  // namespace

int64_t rejection_sample_scratch_size(const RejectionSampleParams& params) {
  Scratch unused;
  return carve(params, nullptr, unused);
}

cudaError_t launch_rejection_sample(const RejectionSampleParams& params, cudaStream_t stream) {
  Scratch s;
  carve(params, params.scratch, s);
  const int64_t row_shards = params.num_reqs * s.max_rows * s.shards;
  if (row_shards > INT32_MAX) return cudaErrorInvalidConfiguration;
  const unsigned row_blocks = static_cast<unsigned>(row_shards);
  const unsigned req_blocks = static_cast<unsigned>(params.num_reqs);
  const size_t row_bytes = static_cast<size_t>(s.max_rows) * sizeof(float);
  if (params.target_tokens == nullptr)
    scan_kernel<<<row_blocks, kShardThreads, 0, stream>>>(params, s);
  if (uses_softmax(params)) {
    accept_kernel<<<req_blocks, kRequestThreads, 2 * row_bytes, stream>>>(params, s);
    if (uses_excess(params)) {
      excess_kernel<<<row_blocks, kShardThreads, 0, stream>>>(params, s);
      block_kernel<<<req_blocks, kRequestThreads, row_bytes, stream>>>(params, s);
    }
    const unsigned shard_blocks = static_cast<unsigned>(params.num_reqs * s.shards);
    residual_kernel<<<shard_blocks, kShardThreads, 0, stream>>>(params, s);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_overlapped(finish_kernel, dim3(req_blocks), kRequestThreads, 2 * row_bytes, stream,
                           Finish{params, s});
}

}  // namespace dflash
