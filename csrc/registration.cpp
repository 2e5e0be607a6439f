// SPDX-License-Identifier: Apache-2.0
// Every schema of torch.ops.dflash: the table of contents. docs/ops.md is generated from these comments.
//
// Letters: R requests of a batch, S state rows (max_num_seqs), T token rows, N draft tokens a request, Q = N + 1,
// H hidden size, D head_dim, V vocabulary, L draft layers, G K/V groups.
// Conventions: ids, positions and slots are int64; lengths, offsets, maps and block tables are int32.
// Batch-ordered tensors are [R]; per-request state is [S] and reached through idx_mapping (batch row -> state row,
// -1 = padded row: inert). A K/V cache is [num_blocks, kv_block_size, num_kv_heads, D] with any strides over a
// contiguous last dimension; slot = block * kv_block_size + offset, -1 = not stored; block 0 is the null block.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(dflash, m) {
  // Rows the target verifies, from device state: [bonus, d_1..d_N] of each request at positions s..s+N, with slots,
  // causal lengths s + Q and uniform offsets r * Q. Positions are clamped to max_model_len - 1; a slot past
  // max_model_len, in the null block or of a padded row is -1; a padded row has length 0.
  m.def(
      "build_verify(Tensor idx_mapping, Tensor seq_lens, Tensor last_sampled, Tensor draft_tokens, "
      "Tensor block_table, int kv_block_size, int max_model_len, Tensor(a!) input_ids, Tensor(b!) positions, "
      "Tensor(c!) slot_mapping, Tensor(d!) query_seq_lens, Tensor(e!) query_start_loc) -> ()");

  // Context rows and query block of the drafter, from the verified rows. Row t of request r is valid when it lies
  // before query_start_loc[r + 1] - num_rejected[r]; an invalid row gets position 0 and slot -1. The query block is
  // [bonus, mask x N] right after the last valid position; the bonus is last_sampled where num_sampled > 0, else
  // next_prefill_tokens. With sample_from_anchor the block has N rows and row 0 is sampled too. The outputs may have
  // room for more requests than the batch: those are padded. next_prefill_tokens and query_input_ids: int64 or int32.
  m.def(
      "build_query(Tensor target_positions, Tensor query_start_loc, Tensor num_sampled, Tensor num_rejected, "
      "Tensor last_sampled, Tensor next_prefill_tokens, Tensor idx_mapping, Tensor[] block_tables, "
      "int[] kv_block_sizes, int num_speculative_tokens, int mask_token_id, int max_model_len, "
      "bool sample_from_anchor, Tensor(a!) context_positions, Tensor(b!)[] context_slot_mappings, "
      "Tensor(c!) query_input_ids, Tensor(d!) query_positions, Tensor(e!)[] query_slot_mappings, "
      "Tensor(f!) query_seq_lens, Tensor(g!) draft_query_start_loc, Tensor(h!) sample_rows, "
      "Tensor(i!) sample_positions, Tensor(j!) sample_idx_mapping) -> ()");

  // K/V of every draft layer for context rows, from the un-normed output of fc: hidden_norm, one GEMM with the
  // stacked K and V projections, per-head k_norm, RoPE at the row's own position, store. kv_weight is
  // [L * 2 * num_kv_heads * D, H], layer by layer, K before V. layer_groups maps a layer to its slot mapping. At most 64
  // fp16 or bf16 rows on sm_90 with heads of 64 or 128: one kernel behind the norm (linear's note on the weight holds).
  // hidden_norm_weight is read before earlier kernels of the stream are done, as in add_rms_norm.
  m.def(
      "precompute_context_kv(Tensor hidden_states, Tensor? hidden_norm_weight, float rms_norm_eps, "
      "Tensor kv_weight, Tensor? kv_bias, Tensor? k_norm_weight, Tensor cos_sin_cache, bool is_neox, "
      "Tensor positions, Tensor[] slot_mappings, int[] layer_groups, float value_scale, Tensor? k_scales, "
      "Tensor? v_scales, Tensor(a!)[] key_caches, Tensor(b!)[] value_caches) -> ()");

  // One pass over qkv [T, (Hq + 2 * Hk) * D]: per-head RMSNorm of q and k, RoPE, q to query [T, Hq, D], K and V to the
  // cache. value_scale multiplies V; an fp8 cache stores x / scale.
  m.def(
      "qk_norm_rope_store(Tensor qkv, Tensor? q_norm_weight, Tensor? k_norm_weight, float rms_norm_eps, "
      "Tensor cos_sin_cache, bool is_neox, Tensor positions, Tensor slot_mapping, float value_scale, "
      "Tensor? k_scale, Tensor? v_scale, Tensor(a!) query, Tensor(b!) key_cache, Tensor(c!) value_cache) -> ()");

  // Attention of ragged query rows over a paged cache. Row i of request r stands at position
  // seq_lens[r] - query_len + i. Key k is visible iff k < min(seq_lens[r], max_seq_len), and with causal k <= q, and
  // q - k <= window_left, k - q <= window_right (-1 = no bound). seq_lens[r] = 0 gives zeros. Sinks are one logit a
  // head that joins the softmax and carries no value. num_splits of the keys: 0 = as many as fill the device; 1, 2, 4,
  // 8 = this many, and then a row's bits depend on its own query and visible keys alone, whatever stands beside it.
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
      "Tensor query_start_loc, int max_query_len, int max_seq_len, float scale, bool causal, int window_left, "
      "int window_right, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, int num_splits, "
      "Tensor(a!) output) -> ()");

  // Draft tokens from logits rows [R * N, >= V]: argmax where temperatures is absent or 0, else Gumbel-max with the
  // draft stream keyed by (seed, anchor position, offset, token). Row j belongs to offset first_column + j % N + 1 and is
  // written to draft_tokens[sample_idx_mapping[j], j % N]: draft_tokens and draft_logits may be the columns of a block
  // from first_column on. NaN counts as -inf. d2t (delta) maps a reduced vocabulary. draft_logits records the scaled
  // logits in the target vocabulary, -inf elsewhere.
  m.def(
      "sample_draft(Tensor logits, Tensor sample_positions, Tensor sample_idx_mapping, Tensor? temperatures, "
      "Tensor? seeds, int vocab_size, float logit_scale, Tensor? d2t, int first_column, Tensor(a!) draft_tokens, "
      "Tensor(b!)? draft_logits) -> ()");

  // The tokens that rows sample from logits_j = logit_scale * hidden_states[j] @ weight[:vocab_size]^T in fp32, which are
  // not rounded. Where lm_head_sample_plan says so (fp16 or bf16 on sm_90, more than 8448 rows of weight) no logits are
  // stored and the weight is read once every 256 rows (see linear); else linear and sample_draft. Without logits_start_loc
  // the rows are draft rows: positions, idx_mapping [T], tokens [S, N] and the noise are sample_draft's. With it they are
  // verified ones: request r's are logits_start_loc[r]..[r + 1), idx_mapping is [R], a row's input stands at positions[j],
  // and tokens[j] is the first maximum of logits_j, or of logits_j / temperature + the target stream's Gumbel at
  // (seed, positions[j] + 1), as in process_logits and rejection_sample. Padded rows write nothing.
  m.def(
      "lm_head_sample(Tensor hidden_states, Tensor weight, Tensor positions, Tensor idx_mapping, "
      "Tensor? logits_start_loc, Tensor? temperatures, Tensor? seeds, int vocab_size, float logit_scale, Tensor? d2t, "
      "int first_column, Tensor(a!) tokens) -> ()");

  // linear_plan's answer where lm_head_sample makes no logits, or nothing; beyond 128 rows, where tiles fill the SMs.
  m.def("lm_head_sample_plan(Tensor hidden_states, Tensor weight, int vocab_size) -> int[]");

  // What the target's logits are sampled from. Rows of request r are logits_start_loc[r]..[r + 1), row i follows
  // d_1..d_i, the token it samples stands at logits_positions + 1. In this order: logit_bias is added (ids -1 unused);
  // stop_token_ids become -inf before min_seq_lens tokens; repetition (in the prompt or generated: l > 0 ? l / r :
  // l * r), frequency (l - f * times generated) and presence (l - p if generated) penalties. At temperature 0 that is
  // all; else l / temperature, then what is not kept becomes -inf: min_p keeps p >= min_p * max p, top_k all that is not
  // less than the k-th largest, top_p what has less than top_p of the remaining mass strictly above it. Bit 31 of
  // token_counts: in the prompt; the rest: times generated, to which row i adds d_1..d_i. NaN counts as -inf. output
  // may be float32 logits; columns past vocab_size and rows of padded requests are not written.
  m.def(
      "process_logits(Tensor logits, Tensor logits_start_loc, Tensor logits_positions, Tensor idx_mapping, "
      "Tensor draft_tokens, Tensor temperatures, Tensor? top_ks, Tensor? top_ps, Tensor? min_ps, "
      "Tensor? repetition_penalties, Tensor? frequency_penalties, Tensor? presence_penalties, Tensor? token_counts, "
      "Tensor? logit_bias_ids, Tensor? logit_bias, Tensor? min_seq_lens, Tensor? stop_token_ids, int vocab_size, "
      "Tensor(a!) output) -> ()");

  // Accept drafts and choose the next token. Logits rows of request r are logits_start_loc[r]..[r + 1) (0 rows: nothing
  // is sampled); row i is p(. | ..., d_1..d_i), already processed. num_draft = min(num_draft_tokens, rows - 1).
  // A draft id outside the vocabulary (-1) ends the block: the next token is drawn as after full acceptance.
  // temperature 0: accept while d == argmax. Else by method: "match" (sample every row, accept while equal),
  // "standard" and "block" (against draft_logits, absent = one-hot), "synthetic" (accept with synthetic_rates[i]).
  // target_tokens, what each row samples (lm_head_sample), may stand in place of target_logits for the methods "match" and
  // "synthetic"; at temperature 0 every method is "match". Commits at most tokens_left and stops after a token of
  // stop_token_ids ([S, K], or [K] for all). sampled_token_ids is -1 past num_sampled; num_rejected = rows - num_sampled.
  m.def(
      "rejection_sample(Tensor? target_logits, Tensor? target_tokens, Tensor logits_start_loc, "
      "Tensor logits_positions, Tensor idx_mapping, Tensor draft_tokens, Tensor num_draft_tokens, "
      "Tensor? draft_logits, Tensor temperatures, Tensor seeds, Tensor tokens_left, Tensor? stop_token_ids, "
      "str method, int vocab_size, Tensor? synthetic_rates, "
      "Tensor(a!) sampled_token_ids, Tensor(b!) num_sampled, Tensor(c!) num_rejected) -> ()");

  // Commit what was sampled to the state: seq_lens += num_sampled, last_sampled, tokens_left -= num_sampled, finished
  // (1 = stop token, 2 = length), and write [step, num_sampled, finished, tokens] to output_ring[step % ring, row];
  // token_counts[row, token] += 1 for each token; step += 1.
  m.def(
      "advance(Tensor sampled_token_ids, Tensor num_sampled, Tensor idx_mapping, Tensor? stop_token_ids, "
      "Tensor(a!) seq_lens, Tensor(b!) last_sampled, Tensor(c!) tokens_left, Tensor(d!) finished, "
      "Tensor(e!) step, Tensor(f!) output_ring, Tensor(g!)? token_counts) -> ()");

  // residual += x (when given); output = RMSNorm(residual) * weight; tap = residual (when given, any row stride). On a GPU
  // the weight is read before earlier kernels of the stream are done: none that may still run must write it.
  m.def(
      "add_rms_norm(Tensor? x, Tensor(a!) residual, Tensor weight, float eps, Tensor(b!) output, "
      "Tensor(c!)? tap) -> ()");

  // output = x @ weight^T + bias. At most 128 fp16 or bf16 rows on sm_90 (16-byte aligned) and at most 32 fp32 rows on a
  // CPU: each weight is read once, and a row's bits do not depend on the number of rows. On sm_90 the weight is read before
  // earlier kernels of the stream are done: none that may still run must write it. Everything else is the library's GEMM.
  // output may be fp32 where x and weight are not, without bias: the sums as they are.
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) output) -> ()");

  // The kernel of linear for these operands: [rows, warpgroups, splits] of the streaming GEMM (x is padded to so many
  // rows, a tile has 64 outputs a warpgroup, K is summed in so many parts), or nothing where it does not serve. splits
  // alone orders a sum, and does not depend on the number of rows.
  m.def("linear_plan(Tensor x, Tensor weight) -> int[]");

  // output = x @ (weight * scale)^T + bias for an e4m3 weight with a scale an output: sums in fp32, times the scale, plus
  // the bias. weight is packed, [ceil(M / 64), ceil(K / 64), 4096], zeros past M and K: dflash.ops.linear_fp8.pack_fp8
  // makes it and csrc/kernels/common/fp8_weight.h says where a weight lies. On sm_90, fp16 or bf16 x (16-byte aligned): half
  // of linear's bytes, read as early, and so are scale and bias; 128 rows at a time, a row's bits independent of the
  // others. Elsewhere on a GPU the weight is unpacked into the dtype of x, a part at a time, for linear. No weight is NaN.
  m.def("linear_fp8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor(a!) output) -> ()");

  // output = silu(x @ gate^T) * (x @ up^T), weight [2 * I, K] = gate then up, both products rounded as linear's. One
  // kernel where I % 8 is 0 and linear streams the weight, at most 128 rows or, if 2 * I fills the SMs to the end, 225
  // to 256 or 449 to 512, with the bits of linear and silu_mul on at most 128; else these two. Weight: as in linear.
  m.def("linear_silu_mul(Tensor x, Tensor weight, Tensor(a!) output) -> ()");

  // output = silu(gate) * up of linear_fp8's products, both rounded as linear_fp8's; weight and scale have 8 rows of gate
  // and 8 of up in turns (dflash.ops.linear_silu_mul_fp8.in_turns), I % 8 is 0. One kernel where linear_fp8 streams, with
  // the bits of linear_fp8 and silu_mul; else these two.
  m.def("linear_silu_mul_fp8(Tensor x, Tensor weight, Tensor scale, Tensor(a!) output) -> ()");

  // output = silu(gate) * up, gate_up [T, 2 * I] = gate then up.
  m.def("silu_mul(Tensor gate_up, Tensor(a!) output) -> ()");
}
