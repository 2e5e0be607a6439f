// SPDX-License-Identifier: Apache-2.0
// One draft step of one request in C++, without Python: build the query block, put the context's
// K/V into a paged cache, attend, sample; each result is compared with plain libtorch. Usage:
// draft_step [cpu | cuda]
#include <dflash/ops.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

namespace {

using torch::Tensor;

constexpr int64_t kHidden = 96, kHeads = 4, kKvHeads = 2, kHeadDim = 64, kVocab = 500;
constexpr int64_t kNumDraft = 3, kQuery = kNumDraft + 1, kMask = 499, kMaxModelLen = 64;
constexpr int64_t kBlockSize = 4, kNumBlocks = 12, kNumRows = 14;
constexpr double kEps = 1e-6;

void check(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "draft_step: FAILED: %s\n", what.c_str());
  std::exit(1);
}

// One draft layer: fused projections, and a head on what attention returns.
struct Drafter {
  torch::TensorOptions options;
  Tensor embedding = 0.5 * torch::randn({kVocab, kHidden}, options);
  Tensor qkv = torch::randn({(kHeads + 2 * kKvHeads) * kHeadDim, kHidden}, options) / 8;
  Tensor hidden_norm = 1 + 0.1 * torch::randn({kHidden}, options);
  Tensor q_norm = 3 + 0.1 * torch::randn({kHeadDim}, options);
  Tensor k_norm = 1 + 0.1 * torch::randn({kHeadDim}, options);
  Tensor head = torch::randn({kVocab, kHeads * kHeadDim}, options);
  Tensor cos_sin = rope_table();  // [kMaxModelLen, kHeadDim]: cosines, then sines

  Tensor kv_weight() const { return qkv.slice(0, kHeads * kHeadDim).contiguous(); }

  Tensor rope_table() const {
    const Tensor powers = torch::arange(0, kHeadDim, 2, options) / kHeadDim;
    const Tensor angles =
        torch::outer(torch::arange(kMaxModelLen, options), torch::pow(10000.0, -powers));
    return torch::cat({angles.cos(), angles.sin()}, -1).contiguous();
  }
};

Tensor rms_norm(const Tensor& x, const Tensor& weight) {
  return x * torch::rsqrt(x.square().mean(-1, true) + kEps) * weight;
}

Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& table) {  // x [T, heads, D]
  const auto cos_sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1);
  const auto halves = x.chunk(2, -1);
  return torch::cat({halves[0] * cos_sin[0] - halves[1] * cos_sin[1],
                     halves[1] * cos_sin[0] + halves[0] * cos_sin[1]},
                    -1);
}

// Attention of the block over the context's hidden states and itself, from the definition: no
// cache, no pages.
Tensor attend_plainly(const Drafter& d, const Tensor& context, const Tensor& ids,
                      const Tensor& positions) {
  const int64_t first = positions[0].item<int64_t>();
  const auto rows = [&](const Tensor& x, int64_t from, int64_t heads) {
    return torch::linear(x, d.qkv.slice(0, from * kHeadDim, (from + heads) * kHeadDim))
        .view({-1, heads, kHeadDim});
  };
  const Tensor block = d.embedding.index_select(0, ids);
  const Tensor inputs = torch::cat({rms_norm(context, d.hidden_norm), block});
  const Tensor all = torch::arange(first + kQuery, positions.options());
  const Tensor q = rope(rms_norm(rows(block, 0, kHeads), d.q_norm), positions, d.cos_sin);
  const Tensor k = rope(rms_norm(rows(inputs, kHeads, kKvHeads), d.k_norm), all, d.cos_sin);
  const Tensor v = rows(inputs, kHeads + kKvHeads, kKvHeads);
  const int64_t group = kHeads / kKvHeads;
  const Tensor scores =
      torch::einsum("qhd,khd->hqk", {q, k.repeat_interleave(group, 1)}) / std::sqrt(kHeadDim);
  return torch::einsum("hqk,khd->qhd", {scores.softmax(-1), v.repeat_interleave(group, 1)});
}

// What build_query writes, at addresses that never change.
struct Query {
  Tensor context_positions, context_slots, ids, positions, slots, seq_lens, start_loc, sample_rows,
      sample_positions, sample_map;

  Query(int64_t num_rows, torch::Device device) {
    const auto int64s = [&](int64_t n) {
      return torch::zeros({n}, torch::dtype(torch::kInt64).device(device));
    };
    const auto int32s = [&](int64_t n) {
      return torch::zeros({n}, torch::dtype(torch::kInt32).device(device));
    };
    context_positions = int64s(num_rows), context_slots = int64s(num_rows);
    ids = int64s(kQuery), positions = int64s(kQuery), slots = int64s(kQuery);
    seq_lens = int32s(1), start_loc = int32s(2);
    sample_rows = int64s(kNumDraft), sample_positions = int64s(kNumDraft),
    sample_map = int32s(kNumDraft);
  }
};

// One request in slots of blocks 7, 2, 9, 4, 11: a part of the step a function, each checked.
struct Step {
  torch::Device device;
  torch::TensorOptions floats = torch::dtype(torch::kFloat32).device(device);
  Drafter drafter{floats};
  Tensor key_cache = torch::zeros({kNumBlocks, kBlockSize, kKvHeads, kHeadDim}, floats);
  Tensor value_cache = torch::zeros_like(key_cache);
  Tensor block_table = int32s({7, 2, 9, 4, 11}).unsqueeze(0);  // [1, 5]; block 0 is nobody's
  Tensor draft_tokens = int64s({-7, -7, -7}).unsqueeze(0);
  Query query{kNumRows, device};

  Tensor int64s(const std::vector<int64_t>& x) const {
    return torch::tensor(x, torch::kInt64).to(device);
  }
  Tensor int32s(const std::vector<int32_t>& x) const {
    return torch::tensor(x, torch::kInt32).to(device);
  }

  // The target has just computed positions 0..13 and rejected the last two; the bonus is token 99.
  void build() {
    const Tensor target_positions = torch::arange(kNumRows, query.positions.options());
    dflash::build_query(target_positions, int32s({0, kNumRows}), int32s({1}), int32s({2}),
                        int64s({99}), int64s({99}), int32s({0}), {block_table}, {kBlockSize},
                        kNumDraft, kMask, kMaxModelLen, false, query.context_positions,
                        {query.context_slots}, query.ids, query.positions, {query.slots},
                        query.seq_lens, query.start_loc, query.sample_rows, query.sample_positions,
                        query.sample_map);
    const Tensor tail = query.context_slots.slice(0, 8);
    check(query.ids.equal(int64s({99, kMask, kMask, kMask})), "query ids");
    check(query.positions.equal(int64s({12, 13, 14, 15})), "query positions");
    check(query.slots.equal(int64s({16, 17, 18, 19})), "position 12 is the first of block 4");
    check(tail.equal(int64s({36, 37, 38, 39, -1, -1})), "context slots: block 9, rejected rows");
    check(query.seq_lens.equal(int32s({16})), "length of context and block");
    check(query.sample_rows.equal(int64s({1, 2, 3})), "the rows of the masks are sampled");
  }

  // features [T, H]: the un-normed output of fc, one row a position.
  void store_context(const Tensor& features) {
    dflash::precompute_context_kv(features, drafter.hidden_norm, kEps, drafter.kv_weight(), {},
                                  drafter.k_norm.unsqueeze(0), drafter.cos_sin, true,
                                  query.context_positions, {query.context_slots}, {0}, 1.0, {}, {},
                                  {key_cache}, {value_cache});
    check(key_cache[0].count_nonzero().item<int64_t>() == 0, "the null block is never written");
  }

  Tensor attend(const Tensor& features) {
    const Tensor qkv = torch::linear(drafter.embedding.index_select(0, query.ids), drafter.qkv);
    Tensor q = torch::empty({kQuery, kHeads, kHeadDim}, floats), output = torch::empty_like(q);
    dflash::qk_norm_rope_store(qkv, drafter.q_norm, drafter.k_norm, kEps, drafter.cos_sin, true,
                               query.positions, query.slots, 1.0, {}, {}, q, key_cache,
                               value_cache);
    dflash::paged_attention(q, key_cache, value_cache, block_table, query.seq_lens, query.start_loc,
                            kQuery, kMaxModelLen, 1 / std::sqrt(kHeadDim), false, -1, -1, {}, {},
                            {}, 0, output);
    const Tensor expected =
        attend_plainly(drafter, features.slice(0, 0, 12), query.ids, query.positions);
    const double error = ((output - expected).norm() / expected.norm()).item<double>();
    check(error < 1e-5, "attention equals plain libtorch, error " + std::to_string(error));
    return output;
  }

  void sample(const Tensor& attended) {
    const Tensor logits = torch::linear(attended.flatten(1), drafter.head);
    dflash::sample_draft(logits.index_select(0, query.sample_rows), query.sample_positions,
                         query.sample_map, {}, {}, kVocab, 1.0, {}, 0, draft_tokens, {});
    check(draft_tokens[0].equal(logits.slice(0, 1).argmax(-1)), "drafts: argmax of rows 1..N");
  }

  // A target that agrees with the first two drafts and then wants token 5.
  void accept() {
    const Tensor wanted = torch::cat({draft_tokens[0].slice(0, 0, 2), int64s({5, 6})});
    const Tensor logits = torch::one_hot(wanted, kVocab).to(torch::kFloat32);
    const Tensor sampled = int64s({-7, -7, -7, -7}).unsqueeze(0);
    const Tensor num_sampled = int32s({-7}), num_rejected = int32s({-7});
    dflash::rejection_sample(logits, {}, int32s({0, kQuery}), query.positions, int32s({0}),
                             draft_tokens, int32s({kNumDraft}), {}, torch::zeros({1}, floats),
                             int64s({0}), int32s({100}), {}, "match", kVocab, {}, sampled,
                             num_sampled, num_rejected);
    const Tensor expected = torch::cat({draft_tokens[0].slice(0, 0, 2), int64s({5, -1})});
    check(sampled[0].equal(expected), "two drafts and the target's own token");
    check(num_sampled.equal(int32s({3})) && num_rejected.equal(int32s({1})), "counts");
  }

  void refuse() const {
    try {
      dflash::silu_mul(torch::zeros({2, 8}, floats), torch::zeros({2, 5}, floats));
    } catch (const std::exception& error) {
      const std::string message = error.what();
      const bool named = message.find("output: expected shape [2, 4], got [2, 5]") != message.npos;
      return check(named, "the op's message in: " + message);
    }
    check(false, "a wrong shape is an exception");
  }
};

void run(torch::Device device) {
  torch::manual_seed(0);
  Step step{device};
  const Tensor features = torch::randn({kNumRows, kHidden}, step.floats);
  step.build();
  step.store_context(features);
  step.sample(step.attend(features));
  step.accept();
  step.refuse();
  std::printf("draft_step: %s: as expected\n", device.str().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(torch::Device(argc > 1 ? argv[1] : "cpu"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "draft_step: %s\n", error.what());
    return 1;
  }
  return 0;
}
