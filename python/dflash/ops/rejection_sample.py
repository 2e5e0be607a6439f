# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from dflash.ops import noise_reference
from dflash.ops.sample_draft import first_argmax

METHODS = ("match", "standard", "block", "synthetic")


def rejection_sample(
    target_logits: torch.Tensor | None,
    logits_start_loc: torch.Tensor,
    logits_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    tokens_left: torch.Tensor,
    *,
    method: str = "match",
    target_tokens: torch.Tensor | None = None,
    draft_logits: torch.Tensor | None = None,
    stop_token_ids: torch.Tensor | None = None,
    vocab_size: int | None = None,
    synthetic_rates: torch.Tensor | None = None,
    sampled_token_ids: torch.Tensor | None = None,
    num_sampled: torch.Tensor | None = None,
    num_rejected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept a prefix of each request's drafts and choose the token after it.

    Request r is state row s = idx_mapping[r] and owns the logits rows logits_start_loc[r] ..
    logits_start_loc[r + 1]; row i is p_i = p(. | ..., d_1 .. d_i). n drafts are verified:
    min(num_draft_tokens[s], rows - 1), less at the first id outside the vocabulary (-1), where the
    block ends and the next token is drawn as after full acceptance. With

        anchor = logits_positions of the request's first row,
        u_i    = uniform of the acceptance stream at (seed, anchor, i),
        t_i    = Gumbel-max sample of p_i by the target stream at (seed, logits_positions[i] + 1),
                 at temperature 0 the first argmax,
        q_i    = softmax(draft_logits / temperature), without draft_logits one-hot at d_i,

    a drafts are accepted and one more token is emitted:

        temperature 0 or match: a = the first i with d_{i+1} != t_i; emits t_a.
        standard:  accepts while u_i q_i(d_i) < p_{i-1}(d_i); emits a sample of max(p - q, 0).
        block:     P_0 = 1, P_i = min(P_{i-1} p_{i-1}(d_i) / q_i(d_i), 1),
                   S_i = sum max(P_i p_i - q_{i+1}, 0), h_i = S_i / (S_i + 1 - P_i), h_n = P_n;
                   a = the last i with u_i < h_i; emits a sample of max(P_a p_a - q_{a+1}, 0).
        synthetic: accepts while u_i < synthetic_rates[i - 1]; emits t_a. For benchmarks: lossy.

    Every method emits t_n when all n are accepted. The other samples use the residual stream at
    (seed, anchor, a + 1). NaN counts as -inf; a row without a number gives token 0. At most
    tokens_left[s] tokens are committed, and none after the first stop id.
    Sources: Leviathan et al. (2211.17192), Sun et al. (2403.10444).

    Args:
        target_logits: [M, >= vocab_size] float32, float16 or bfloat16, any row stride, already
            divided by the temperature; None with target_tokens.
        logits_start_loc: [R + 1] int32; a request may have 0 rows.
        logits_positions: [M] int64, positions of the rows' input tokens.
        idx_mapping: [R] int32, state row, -1 = padded.
        draft_tokens: [S, N] int64; N may be 0.
        num_draft_tokens: [S] int32.
        temperatures: [S] float32.
        seeds: [S] int64.
        tokens_left: [S] int32; <= 0 commits nothing.
        method: match, standard, block or synthetic.
        target_tokens: [M] int64, t_i of every row in place of target_logits (`lm_head_sample`
            leaves them), for match and synthetic.
        draft_logits: [S, N, >= vocab_size] of any of the three dtypes, as sample_draft records.
        stop_token_ids: [S, K] int64 padded with -1, or [K] for every request.
        vocab_size: columns that count, padding excluded; all when absent. Required with
            target_tokens.
        synthetic_rates: [>= N] float32, conditional acceptance rates.
        sampled_token_ids: [R, N + 1] int64, written; -1 past num_sampled. Allocated when absent,
            like the next two.
        num_sampled: [R] int32, written.
        num_rejected: [R] int32, written: rows - num_sampled, 0 for a padded request.

    Returns:
        sampled_token_ids, num_sampled, num_rejected.

    Raises:
        ValueError: an unknown method, synthetic without rates, both or neither of target_logits and
            target_tokens, or vocab_size outside the columns of target_logits.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method}")
    if method == "synthetic" and synthetic_rates is None:
        raise ValueError("synthetic_rates: required by method synthetic")
    vocab_size = _checked_vocab_size(vocab_size, target_logits, target_tokens)
    num_reqs = idx_mapping.shape[0]
    if sampled_token_ids is None:
        sampled_token_ids = draft_tokens.new_empty(num_reqs, draft_tokens.shape[1] + 1)
    if num_sampled is None:
        num_sampled = idx_mapping.new_empty(num_reqs)
    if num_rejected is None:
        num_rejected = idx_mapping.new_empty(num_reqs)
    torch.ops.dflash.rejection_sample(
        target_logits,
        target_tokens,
        logits_start_loc,
        logits_positions,
        idx_mapping,
        draft_tokens,
        num_draft_tokens,
        draft_logits,
        temperatures,
        seeds,
        tokens_left,
        stop_token_ids,
        method,
        vocab_size,
        synthetic_rates,
        sampled_token_ids,
        num_sampled,
        num_rejected,
    )
    return sampled_token_ids, num_sampled, num_rejected


def _checked_vocab_size(
    vocab_size: int | None, target_logits: torch.Tensor | None, target_tokens: torch.Tensor | None
) -> int:
    if (target_logits is None) == (target_tokens is None):
        raise ValueError("target_logits, target_tokens: expected one of the two")
    if target_logits is None:
        if vocab_size is None:
            raise ValueError("vocab_size: required with target_tokens")
        return vocab_size
    columns = target_logits.shape[-1]
    vocab_size = columns if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= columns:
        raise ValueError(
            f"vocab_size: expected 1 to {columns} (the columns of target_logits), got {vocab_size}"
        )
    return vocab_size


@torch.library.register_fake("dflash::rejection_sample")
def _(
    target_logits: torch.Tensor | None,
    target_tokens: torch.Tensor | None,
    logits_start_loc: torch.Tensor,
    logits_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    tokens_left: torch.Tensor,
    stop_token_ids: torch.Tensor | None,
    method: str,
    vocab_size: int,
    synthetic_rates: torch.Tensor | None,
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    return None


def rejection_sample_reference(
    target_logits: torch.Tensor,
    logits_start_loc: torch.Tensor,
    logits_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    tokens_left: torch.Tensor,
    *,
    method: str = "match",
    draft_logits: torch.Tensor | None = None,
    stop_token_ids: torch.Tensor | None = None,
    vocab_size: int | None = None,
    synthetic_rates: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in plain torch, request by request, in fp64; never serves."""
    num_ids = target_logits.shape[1] if vocab_size is None else vocab_size
    max_drafts = draft_tokens.shape[1]
    tokens, num_sampled, num_rejected = [], [], []
    for r, s in enumerate(idx_mapping.tolist()):
        rows = range(int(logits_start_loc[r]), int(logits_start_loc[r + 1]))
        committed: list[int] = []
        if s >= 0 and len(rows) > 0:
            n = max(0, min(int(num_draft_tokens[s]), len(rows) - 1, max_drafts))
            drafts = draft_tokens[s, :n].tolist()
            invalid = [i for i, d in enumerate(drafts) if not 0 <= d < num_ids]
            request = _Request(
                drafts[: invalid[0]] if invalid else drafts,
                _clean(target_logits[rows.start : rows.stop, :num_ids]),
                logits_positions[rows.start : rows.stop].tolist(),
                float(temperatures[s]),
                int(seeds[s]),
            )
            q = None
            if draft_logits is not None and request.temperature > 0:
                q = (_clean(draft_logits[s, :, :num_ids]) / request.temperature).softmax(-1)
            rates = None if synthetic_rates is None else synthetic_rates.tolist()
            committed = _verify(request, method, q, rates)[: max(0, int(tokens_left[s]))]
            if stop_token_ids is not None:
                shared = stop_token_ids.dim() == 1
                stops = (stop_token_ids if shared else stop_token_ids[s]).tolist()
                ends = [i + 1 for i, token in enumerate(committed) if token in stops]
                committed = committed[: ends[0]] if ends else committed
        tokens.append(committed + [-1] * (max_drafts + 1 - len(committed)))
        num_sampled.append(len(committed))
        num_rejected.append(len(rows) - len(committed) if s >= 0 else 0)
    device = target_logits.device
    return (
        torch.tensor(tokens, dtype=torch.int64, device=device).view(-1, max_drafts + 1),
        torch.tensor(num_sampled, dtype=torch.int32, device=device),
        torch.tensor(num_rejected, dtype=torch.int32, device=device),
    )


class _Request:
    def __init__(
        self,
        drafts: list[int],
        logits: torch.Tensor,
        positions: list[int],
        temperature: float,
        seed: int,
    ) -> None:
        self.drafts, self.logits, self.positions = drafts, logits, positions
        self.temperature, self.seed = temperature, seed
        self.ids = torch.arange(logits.shape[1], device=logits.device)

    def choice(self, i: int) -> int:
        """t_i."""
        if self.temperature <= 0:
            return first_argmax(self.logits[i])
        stream, position = noise_reference.TARGET, self.positions[i] + 1
        noise = noise_reference.gumbel(stream, self.seed, position, 0, self.ids)
        return first_argmax(self.logits[i] + noise)

    def uniform(self, i: int) -> float:
        """u_i, i from 1."""
        stream, anchor = noise_reference.ACCEPTANCE, self.positions[0]
        return float(noise_reference.uniform(stream, self.seed, anchor, i, self.ids[:1]))

    def residual(self, i: int, weights: torch.Tensor) -> int:
        """A sample in proportion to weights, in place of draft i, i from 1."""
        stream, anchor = noise_reference.RESIDUAL, self.positions[0]
        noise = noise_reference.exponential(stream, self.seed, anchor, i, self.ids)
        return first_argmax(weights / noise)


def _clean(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.double()
    return logits.masked_fill(logits.isnan(), -torch.inf)


def _verify(
    request: _Request, method: str, q: torch.Tensor | None, rates: list[float] | None
) -> list[int]:
    """The accepted drafts and the token after them."""
    drafts = request.drafts
    n = len(drafts)
    if method == "synthetic":
        assert rates is not None
        a = next((i for i in range(n) if not request.uniform(i + 1) < rates[i]), n)
        return [*drafts[:a], request.choice(a)]
    if method == "match" or request.temperature <= 0:
        for i in range(n + 1):
            token = request.choice(i)
            if i == n or token != drafts[i]:
                return [*drafts[:i], token]
    p = request.logits[: n + 1].softmax(-1)
    if q is None:
        ids = torch.tensor(drafts, dtype=torch.int64, device=p.device)
        q = torch.nn.functional.one_hot(ids, p.shape[1]).double()
    a, path = (_standard if method == "standard" else _block)(request, p, q)
    token = (
        request.choice(n) if a == n else request.residual(a + 1, (path * p[a] - q[a]).clamp_min(0))
    )
    return [*drafts[:a], token]


def _standard(request: _Request, p: torch.Tensor, q: torch.Tensor) -> tuple[int, float]:
    for i, d in enumerate(request.drafts):
        if not request.uniform(i + 1) * q[i, d] < p[i, d]:
            return i, 1.0
    return len(request.drafts), 1.0


def _block(request: _Request, p: torch.Tensor, q: torch.Tensor) -> tuple[int, float]:
    n = len(request.drafts)
    path, a, path_of_a = 1.0, 0, 1.0
    for i, d in enumerate(request.drafts, start=1):
        path = min(path * float(p[i - 1, d] / q[i - 1, d]), 1.0)
        threshold = path
        if i < n:
            excess = float((path * p[i] - q[i]).clamp_min(0).sum())
            threshold = excess / max(excess + 1.0 - path, 1e-300)
        if request.uniform(i) < threshold:
            a, path_of_a = i, path
    return a, path_of_a
