// SPDX-License-Identifier: Apache-2.0
// The tokens that rows sample from logits = hidden weight^T, which are never stored: the streaming
// GEMM (common/gemm_mainloop.h). A CTA keeps each row's first maximum over its tiles and leaves its
// key; the last kernel of sample_draft merges them. Larger keys win, in any order. Where rows may
// have noise, warpgroups pass 16 of them at a time through shared memory, where 16 lanes own a row
// and a lane four neighbouring columns (one Philox call); else threads compare the sums they have.
// Of more than 128 rows a CTA keeps to one block of 128. Bytes moved: the weight, once every 256
// rows.
#include "lm_head_sample.h"

#include "common/gemm_launch.h"
#include "common/reduce.h"
#include "common/vec.h"

namespace dflash {
namespace {

constexpr int kWarpgroups = 3;
constexpr int kRows = 16;                     // that pass through shared memory at once
constexpr int kPitch = gemm::kGroupRows + 4;  // floats: no conflicts for fragments or for quads
constexpr int kSumBytes = kRows * kPitch * 4;
constexpr int kAllGroups = 1 + kWarpgroups;  // a named barrier that no warpgroup uses alone

// What the noise of a row needs.
struct RowNoise {
  int64_t seed;
  int64_t position;
  int32_t offset;  // of the stream; -1: the row takes its first maximum, or nothing
  float temperature;
};

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The keys that CTAs leave: a row of x has one of each CTA that takes its block.
struct Keys {
  uint64_t* keys;  // [num_rows, CTAs of a row block]
  int row_blocks;  // of x: CTAs take them in turns

  __device__ __forceinline__ void put(int row, uint64_t key) const {
    const int64_t keys_per_row = gridDim.x / row_blocks;
    keys[row * keys_per_row + blockIdx.x / row_blocks] = key;
  }
};

// N rows, none with noise: a thread keeps the maxima of the columns that its fragments have. The
// place of a warpgroup: keys [4, N] of its warps.
template <int N>
struct ArgmaxEpilogue {
  static constexpr bool kInterleaved = false, kHasState = true, kPacked = false;
  static constexpr int kBytes = 4 * N * static_cast<int>(sizeof(uint64_t));

  // Of two rows in a word, where the maximum is: a warpgroup's first column / 32, plus 1 for the
  // second of a thread's columns. More would not fit a thread's 128 registers beside the sums.
  static constexpr int64_t kMaxVocabSize = int64_t{32} << 16;
  struct State {
    float top[N / 8][2];
    uint32_t at[N / 8];
  };

  Keys keys;
  float scale;
  int vocab_size;
  int first_row;

  __device__ __forceinline__ ArgmaxEpilogue from_row(int row) const {
    return {keys, scale, vocab_size, row};
  }

  // A thread's first column of a warpgroup's.
  __device__ __forceinline__ static int own_column() {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  template <int, class TakeTiles>
  __device__ __forceinline__ void choose(int row, int, const TakeTiles& take_tiles) const {
    wait_for_predecessor();  // which may still use the keys' memory
    take_tiles(from_row(row));
  }

  template <int, int>
  __device__ __forceinline__ State begin(int, uint8_t*) const {
    State state;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      state.top[j][0] = state.top[j][1] = kNegativeInfinity;
      state.at[j] = 0;
    }
    return state;
  }

  // Later columns are larger ones: the first of equal values stays. NaN is never larger.
  template <int, int, int kFragments>
  __device__ __forceinline__ void finish(const float (&acc)[kFragments][4], State& state, int,
                                         int column, uint8_t*) const {
    static_assert(kFragments == N / 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (column + 8 * half + own_column() >= vocab_size) return;
      const uint32_t at = column / 32 + half;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float value = at_most_largest(acc[j][2 * half + r] * scale);
          if (!(value > state.top[j][r])) continue;
          state.top[j][r] = value;
          state.at[j] = __byte_perm(state.at[j], at, r == 0 ? 0x3254 : 0x5410);
        }
      }
    }
  }

  // clean_logit, but for NaN.
  __device__ __forceinline__ static float at_most_largest(float x) {
    float y;
    asm("min.NaN.f32 %0, %1, 0f7F7FFFFF;" : "=f"(y) : "f"(x));
    return y;
  }

  template <int, int W>
  __device__ __forceinline__ void end(const State& state, int num_rows, uint8_t* places) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t* const all = reinterpret_cast<uint64_t*>(places);  // [4 * W, N]
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float top = state.top[j][r];
        const int at = state.at[j] >> 16 * r & 0xffff;
        const int column = at / 2 * 64 + at % 2 * 8 + own_column();
        uint64_t key = argmax_key(top, top > kNegativeInfinity ? column : 0);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
          key = larger(key, __shfl_xor_sync(0xffffffffu, key, offset));
        if (lane < 4) all[warp * N + 8 * j + 2 * lane + r] = key;
      }
    }
    named_barrier(kAllGroups, 128 * W);
    const int row = static_cast<int>(threadIdx.x);
    if (row >= num_rows) return;
    uint64_t key = 0;
#pragma unroll
    for (int w = 0; w < 4 * W; ++w) key = larger(key, all[w * N + row]);
    keys.put(first_row + row, key);
  }
};

// N rows. The place of a warpgroup: sums [16, kPitch], keys [N], and the noise of every third row.
template <int N>
struct SampleEpilogue {
  static constexpr bool kInterleaved = false, kHasState = true, kPacked = false;
  static constexpr int kNoises = (N + kWarpgroups - 1) / kWarpgroups;
  static constexpr int kNoiseAt = kSumBytes + N * static_cast<int>(sizeof(uint64_t));
  static constexpr int kBytes =
      (kNoiseAt + kNoises * static_cast<int>(sizeof(RowNoise)) + 15) / 16 * 16;

  SampleDraftParams p;
  Keys keys;
  int first_row;

  __device__ __forceinline__ SampleEpilogue from_row(int row) const {
    SampleEpilogue epilogue = *this;
    epilogue.first_row = row;
    return epilogue;
  }

  __device__ __forceinline__ static uint64_t* keys_of(uint8_t* places, int group) {
    return reinterpret_cast<uint64_t*>(places + group * kBytes + kSumBytes);
  }

  __device__ __forceinline__ static RowNoise* noise_of(uint8_t* places, int row) {
    uint8_t* place = places + row % kWarpgroups * kBytes;
    return reinterpret_cast<RowNoise*>(place + kNoiseAt) + row / kWarpgroups;
  }

  template <int, int W>
  __device__ __forceinline__ gemm::NoState begin(int num_rows, uint8_t* places) const {
    static_assert(W == kWarpgroups && N <= 128 * W);
    const int t = static_cast<int>(threadIdx.x);
    for (int i = t; i < N * W; i += 128 * W) keys_of(places, i / N)[i % N] = 0;
    if (t < num_rows) {
      const DraftRow r = draft_row(p, first_row + t);
      *noise_of(places, t) = {r.noise.seed, r.noise.position, r.greedy ? -1 : r.noise.offset,
                              r.temperature};
    }
    named_barrier(kAllGroups, 128 * W);
    return {};
  }

  template <int kFirst, int, int kFragments>
  __device__ __forceinline__ void finish(const float (&acc)[kFragments][4], gemm::NoState&,
                                         int num_rows, int column, uint8_t* place) const {
    static_assert(kFirst == 0 && kFragments == N / 8);
    const int group = threadIdx.x / 128;
    float* sums = reinterpret_cast<float*>(place);
#pragma unroll 1
    for (int first = 0; first < num_rows; first += kRows) {
      named_barrier(1 + group, 128);  // the rows before are read
#pragma unroll
      for (int j = 0; j < N / 8; j += 2) {
        if (8 * j != first) continue;
        put(acc[j], 0, sums);
        put(acc[j + 1], 8, sums);
      }
      named_barrier(1 + group, 128);
      scan(first, num_rows, column, sums, place - group * kBytes, group);
    }
  }

  __device__ __forceinline__ static void put(const float (&fragment)[4], int row, float* sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float* to = sums + (row + lane % 4 * 2) * kPitch + warp * 16 + lane / 4;
    to[0] = fragment[0];
    to[kPitch] = fragment[1];
    to[8] = fragment[2];
    to[kPitch + 8] = fragment[3];
  }

  __device__ __forceinline__ void scan(int first, int num_rows, int column, const float* sums,
                                       uint8_t* places, int group) const {
    const int lane = threadIdx.x % 16;
#pragma unroll 1
    for (int i = threadIdx.x / 16 % 8; i < kRows && first + i < num_rows; i += 8) {
      const int64_t at = column + lane * 4;
      const Vec<float, 4> x = load_vec<4>(sums + i * kPitch + lane * 4);
      const uint64_t key = row_maximum(best(x, at, *noise_of(places, first + i)));
      // The same half of a warp at every tile: no other thread touches it.
      uint64_t& kept = keys_of(places, group)[first + i];
      if (lane == 0) kept = larger(kept, key);
    }
    __syncwarp();
  }

  // Of four neighbouring columns.
  __device__ __forceinline__ uint64_t best(const Vec<float, 4>& sums, int64_t column,
                                           const RowNoise& row) const {
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[k] = column + k < p.vocab_size ? clean_logit(sums.x[k] * p.logit_scale)
                                       : kNegativeInfinity;
    }
    if (row.offset >= 0) {
      const bool is_verified = p.logits_start_loc != nullptr;
      const NoiseKey noise{is_verified ? Stream::kTarget : Stream::kDraft, row.offset, row.seed,
                           row.position};
      const Philox4 words = target_words(p, noise, column);
      const float inverse = 1.0f / row.temperature;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        x[k] = race_score(is_verified, row.temperature, inverse, x[k], words.x[k]);
    }
    float top = x[0];
    int index = 0;
#pragma unroll
    for (int k = 1; k < 4; ++k) {
      if (!(x[k] > top)) continue;
      top = x[k];
      index = k;
    }
    return argmax_key(top, column + index);
  }

  // Over the 16 lanes of a row.
  __device__ __forceinline__ static uint64_t row_maximum(uint64_t key) {
    const unsigned lanes = lane_group_mask<16>();
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
      key = larger(key, __shfl_xor_sync(lanes, key, offset));
    return key;
  }

  template <int, int W>
  __device__ __forceinline__ void end(gemm::NoState, int num_rows, uint8_t* places) const {
    named_barrier(kAllGroups, 128 * W);
    const int row = static_cast<int>(threadIdx.x);
    if (row >= num_rows) return;
    uint64_t key = 0;
#pragma unroll
    for (int group = 0; group < W; ++group) key = larger(key, keys_of(places, group)[row]);
    keys.put(first_row + row, key);
  }
};

// N rows of which the device knows whether any has noise.
template <int N>
struct NoiseEpilogue {
  static constexpr bool kInterleaved = false, kHasState = true, kPacked = false;
  static constexpr int kBytes = SampleEpilogue<N>::kBytes;
  static_assert(kBytes >= ArgmaxEpilogue<N>::kBytes);

  SampleEpilogue<N> with_noise;
  ArgmaxEpilogue<N> without;

  template <int W, class TakeTiles>
  __device__ __forceinline__ void choose(int row, int num_rows, const TakeTiles& take_tiles) const {
    wait_for_predecessor();
    const int t = static_cast<int>(threadIdx.x);
    const bool has_noise = t < num_rows && !draft_row(with_noise.p, row + t).greedy;
    const bool is_large = with_noise.p.vocab_size > ArgmaxEpilogue<N>::kMaxVocabSize;
    if (named_barrier_or(kAllGroups, 128 * W, has_noise || is_large)) {
      take_tiles(with_noise.from_row(row));
    } else {
      take_tiles(without.from_row(row));
    }
  }
};

int row_blocks(const LmHeadSampleParams& p) {
  return gemm::num_row_blocks(p.head.num_rows, gemm::kMaxRows, p.head.num_rows > gemm::kMaxRows);
}

int keys_per_row(const LmHeadSampleParams& p) {
  const int tiles = gemm::num_tiles(p.sample.vocab_size, kWarpgroups);
  return gemm::ctas_per_block(tiles, row_blocks(p));
}

template <typename T, int N, bool kSharesWeight = false>
cudaError_t launch_rows(const LmHeadSampleParams& p, cudaStream_t stream) {
  const auto run = [&](const auto& epilogue) {
    return gemm::launch_shape<T, N, kWarpgroups, kSharesWeight>(known_part(p), 1, epilogue, stream);
  };
  const Keys keys{static_cast<uint64_t*>(p.sample.scratch), row_blocks(p)};
  const int vocab_size = static_cast<int>(p.sample.vocab_size);
  const ArgmaxEpilogue<N> argmax{keys, p.sample.logit_scale, vocab_size, 0};
  const bool may_have_noise = p.sample.temperatures != nullptr;
  if (may_have_noise || p.sample.vocab_size > ArgmaxEpilogue<N>::kMaxVocabSize)
    return run(NoiseEpilogue<N>{{p.sample, keys, 0}, argmax});
  return run(argmax);
}

template <typename T>
cudaError_t launch(const LmHeadSampleParams& p, cudaStream_t stream) {
  if (p.head.num_rows > gemm::kMaxRows)
    return launch_rows<T, gemm::kMaxRows, /*kSharesWeight=*/true>(p, stream);
  switch (choose(p).rows) {
    case 16: return launch_rows<T, 16>(p, stream);
    case 32: return launch_rows<T, 32>(p, stream);
    case 64: return launch_rows<T, 64>(p, stream);
    default: return launch_rows<T, 128>(p, stream);
  }
}

}  // namespace

int64_t lm_head_sample_scratch_size(const LmHeadSampleParams& params) {
  return params.sample.num_rows * keys_per_row(params) * static_cast<int64_t>(sizeof(uint64_t));
}

cudaError_t launch_lm_head_sample(const LmHeadSampleParams& params, cudaStream_t stream) {
  if (device_properties().major != 9 || !can_fuse(params)) return cudaErrorInvalidValue;
  const cudaError_t error = params.head.dtype == DType::kFloat16 ? launch<Half>(params, stream)
                                                                 : launch<BFloat16>(params, stream);
  if (error != cudaSuccess) return error;
  return launch_finish_sample(params.sample, static_cast<const uint64_t*>(params.sample.scratch),
                              keys_per_row(params), stream);
}

}  // namespace dflash
