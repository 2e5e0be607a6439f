# SPDX-License-Identifier: Apache-2.0
"""An ordinary small model as drafter: what it proposes, whatever becomes of its K/V, and that it changes no token."""

from __future__ import annotations

import random

import pytest
import torch

from dflash.engine.sampling_params import SamplingParams
from dflash.ops import noise_reference
from tests.engine.conftest import NUM_TOKENS, PROMPTS
from tests.engine.test_step import generate, oracle
from tests.support import demo, engine, tiny

N = 4
NUM_RIGHT = {"all": (N, N), "none": (0, 0), "some": (0, N)}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Another architecture, depth, width, head size and number of heads than the target's."""
    return tiny.make_target(
        tmp_path_factory.mktemp("small"),
        "qwen3",
        seed=5,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=96,
        eos_token_id=None,
    )


@pytest.fixture(scope="module")
def small_model(small):
    return tiny.load_target(small)


def make_llm(target, small, **arguments):
    defaults = {"draft_method": "autoregressive", "max_model_len": 128}
    return engine.make_llm(target, small, **(defaults | arguments))


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def check_proposals(model, proposals, prompts, answers) -> None:
    """Each is what transformers' generate says behind the same tokens."""
    for p in proposals:
        tokens = prompts[p.request_id] + answers[p.request_id]
        assert tokens[p.position] == p.bonus
        assert p.proposed == demo.greedy(model, tokens[: p.position + 1], len(p.proposed))


def said(proposals) -> set[tuple[int, ...]]:
    return {(p.request_id, p.position, *p.proposed) for p in proposals}


@pytest.mark.parametrize("kv_block_size", [1, 16])
@pytest.mark.parametrize("accepted", NUM_RIGHT)
def test_proposals_are_the_small_models_own(
    accepted, kv_block_size, target, small, small_model, answers
):
    """With blocks that end before, at and behind the edge of a page, and every number of rejected rows."""
    choose = random.Random(0)
    llm = make_llm(target, small, kv_block_size=kv_block_size)
    follow = oracle(answers, PROMPTS, lambda _: choose.randint(*NUM_RIGHT[accepted]))
    outputs, proposals = generate(llm, follow)
    assert llm.facts.num_speculative_tokens == N
    assert tokens_of(outputs) == answers
    check_proposals(small_model, proposals, PROMPTS, answers)
    if accepted == "all":
        assert outputs[0].statistics.num_steps == -(-(NUM_TOKENS - 1) // (N + 1))


@pytest.mark.parametrize("num_speculative_tokens", [1, 4, 7])
def test_a_target_that_drafts_for_itself_is_always_right(num_speculative_tokens, target, answers):
    n = num_speculative_tokens
    llm = make_llm(target, target, num_speculative_tokens=n)
    count = 1 + 4 * (n + 1)
    outputs = llm.generate(PROMPTS, engine.greedy_params(count))
    assert [t[:NUM_TOKENS] for t in tokens_of(outputs)] == [a[:count] for a in answers]
    assert llm.statistics.acceptance_length == n + 1


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sampled_drafts_of_the_target_itself_are_right(method, target):
    """q is p: a record that is not what the drafts were drawn from would show."""
    arguments = {"rejection_sample_method": method, "draft_sample_method": "gumbel"}
    llm = make_llm(target, target, **arguments)
    params = [SamplingParams(seed=i, max_tokens=1 + 6 * (N + 1)) for i in range(len(PROMPTS))]
    llm.generate(PROMPTS, params)
    assert llm.statistics.acceptance_length > N + 0.9


def test_sampled_match_changes_no_token(target, small):
    params = [
        SamplingParams(temperature=0.4 * i, top_k=(0, 9)[i % 2], seed=i, max_tokens=NUM_TOKENS)
        for i in range(len(PROMPTS))
    ]
    llm = make_llm(target, small)
    drafted = tokens_of(llm.generate(PROMPTS, params))
    assert drafted == tokens_of(llm.without_draft().generate(PROMPTS, params))
    assert len({tuple(tokens[:8]) for tokens in drafted}) == len(PROMPTS)


class NoiseCheck:
    """Holds every sampled block to its recorded logits, to the small model's and to the noise of its anchor."""

    def __init__(self, llm, small_model) -> None:
        self.num_checked = 0
        self._model, self._core = small_model, llm.core
        speculator = llm.core._step.speculator
        self._propose, speculator.propose = speculator.propose, self

    def __call__(self, batch, state, sampling, **arguments) -> None:
        self._propose(batch, state, sampling, **arguments)
        scheduler = self._core.scheduler
        requests = {r.row: r for r in (*scheduler.prefilling, *scheduler.running)}
        for row, count in zip(batch.idx_mapping.tolist(), batch.num_sampled.tolist(), strict=True):
            if count:
                self._check(requests[row], row, batch, state, sampling)

    def _check(self, request, row, batch, state, sampling) -> None:
        r = batch.idx_mapping.tolist().index(row)
        committed = batch.sampled_token_ids[r, : batch.num_sampled[r]].tolist()
        anchor, drafts = int(state.seq_lens[row]), state.draft_tokens[row].tolist()
        tokens = request.tokens(0, request.num_tokens) + committed
        assert len(tokens) == anchor + 1
        with torch.no_grad():
            expected = self._model(torch.tensor([tokens + drafts[:-1]])).logits[0, -len(drafts) :]
        torch.testing.assert_close(state.draft_logits[row], expected, rtol=1e-3, atol=1e-3)
        ids, seed = torch.arange(expected.shape[1]), int(sampling.seeds[row])
        for i, draft in enumerate(drafts):
            noise = noise_reference.gumbel(noise_reference.DRAFT, seed, anchor, i + 1, ids)
            scaled = state.draft_logits[row, i].double() / float(sampling.temperatures[row])
            assert draft == int((scaled + noise).argmax())
            self.num_checked += 1


def test_the_noise_of_a_draft_is_its_blocks_anchor_and_offset(target, small, small_model):
    """A position drafted again after a rejection gets fresh noise: the anchor is another."""
    arguments = {"rejection_sample_method": "standard", "draft_sample_method": "gumbel"}
    llm = make_llm(target, small, **arguments)
    check = NoiseCheck(llm, small_model)
    params = [
        SamplingParams(temperature=0.5 + i / 2, seed=-i, max_tokens=20) for i in range(len(PROMPTS))
    ]
    llm.generate(PROMPTS, params)
    assert check.num_checked > 100


VARIANTS = {
    "one token a chunk": {"max_num_batched_tokens": 1},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "one request at a time": {"max_num_seqs": 1},
    "strict": {"strict": True},
    "preemption": {"num_gpu_blocks_override": 24, "kv_block_size": 4},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_becomes_of_the_cache_changes_no_proposal(name, target, small, small_model, answers):
    arguments = {"enable_prefix_caching": False, "max_model_len": 80} | VARIANTS[name]
    llm = make_llm(target, small, **arguments)
    outputs, proposals = generate(llm, None)
    assert tokens_of(outputs) == answers
    check_proposals(small_model, proposals, PROMPTS, answers)
    assert (name == "preemption") == (llm.core.scheduler.num_preemptions > 0)


def test_a_resumed_request_enters_with_drafts(target, small, answers):
    """It takes as many steps as without preemption: none of them verifies nothing."""
    llm = make_llm(target, small, **VARIANTS["preemption"], max_model_len=80)
    follow = oracle(answers, PROMPTS, lambda count: count)
    outputs, _ = generate(llm, follow)
    assert tokens_of(outputs) == answers
    assert llm.core.scheduler.num_preemptions > 0
    assert {o.statistics.num_steps for o in outputs} == {-(-(NUM_TOKENS - 1) // (N + 1))}


def test_a_prefix_hit_restores_the_drafters_cache_too(target, small, answers):
    llm = make_llm(target, small, kv_block_size=4)
    runs = []
    for _ in range(2):
        (output,), proposals = generate(llm, None, [PROMPTS[3]])
        assert tokens_of([output]) == [answers[3]]
        runs.append([(p.position, p.proposed) for p in proposals])
        engine.Recorder(llm).detach()
    assert output.usage.cached_tokens == 16
    assert runs[0] == runs[1]


@pytest.mark.parametrize("room", range(1, 10))
@pytest.mark.parametrize("kv_block_size", [1, 16])
def test_blocks_that_cross_max_model_len(room, kv_block_size, target, small, answers):
    prompt = PROMPTS[3]
    llm = make_llm(target, small, max_model_len=len(prompt) + room, kv_block_size=kv_block_size)
    follow = oracle(answers, PROMPTS, lambda count: count)
    engine.Recorder(llm, lambda _, position, count: follow(3, position, count))
    (output,) = llm.generate([prompt], engine.greedy_params(NUM_TOKENS))
    assert output.outputs[0].token_ids == answers[3][:room]
    assert output.outputs[0].finish_reason == "length"


def test_block_0_is_never_written(target, small, answers):
    llm = make_llm(target, small, max_model_len=64)
    caches = llm.core._step.speculator.drafter.decoder.caches
    null_blocks = [tensor[0] for cache in caches for tensor in (cache.key, cache.value)]
    for block in null_blocks:
        block.fill_(123.0)
    generate(llm, oracle(answers, PROMPTS, lambda count: count))
    assert all((block == 123.0).all() for block in null_blocks)


def test_a_target_padded_further_than_the_drafter(small, tmp_path):
    """Ids that only the target's head has: never proposed, and embedded as some token when committed."""
    target = tiny.make_target(tmp_path, vocab_size=48, eos_token_id=None)
    tiny.write_tokenizer(target, 32)
    llm = make_llm(target, small)
    recorder = engine.Recorder(llm)
    params = engine.greedy_params(24, logit_bias=dict.fromkeys(range(40, 48), 4.0))
    outputs = tokens_of(llm.generate(PROMPTS, params))
    assert any(token >= 32 for tokens in outputs for token in tokens)
    assert outputs == tokens_of(llm.without_draft().generate(PROMPTS, params))
    proposed = torch.tensor([p.proposed for p in recorder.proposals])
    assert ((proposed >= 0) & (proposed < 32)).all()


def test_fp8_drafter_cache(target, small, answers):
    llm = make_llm(target, small, draft_kv_cache_dtype="fp8")
    assert tokens_of(llm.generate(PROMPTS, engine.greedy_params(NUM_TOKENS))) == answers
    assert llm.core._step.speculator.drafter.decoder.caches[0].key.dtype == torch.float8_e4m3fn


def test_parts_say_what_a_graph_cannot_capture(target, small, draft):
    """An eager backend of the drafter keeps its forwards out of the graph, and nothing else."""

    def eager_parts(*checkpoints, **arguments) -> set[str]:
        llm = engine.make_llm(*checkpoints, max_model_len=64, **arguments)
        parts = {p.name: p.eager_reason for p in llm.core._step.decode_parts}
        assert all("on the host" in (parts[n] or "on the host") for n in ("observe", "propose"))
        return {name for name, reason in parts.items() if reason} - {"logprobs"}

    sdpa = {"draft_attention_backend": "sdpa"}
    small_model = {"draft_method": "autoregressive"}
    assert eager_parts(target, small, **small_model) == set()
    assert eager_parts(target, small, **small_model, **sdpa) == {"observe", "propose"}
    assert eager_parts(target, draft, **sdpa) == {"propose"}


def test_the_memory_profile_counts_the_drafter(target, small):
    llm = make_llm(target, small)
    drafter = llm.core._step.speculator.drafter
    own = sum(t.numel() * 4 for t in tiny.load_target(small).parameters())
    own += drafter.decoder.rope_table.numel() * 4
    plain = llm.without_draft().facts
    assert llm.facts.memory.weights - plain.memory.weights == own
    both = [m.decoder for m in (llm.core._step.target, drafter)]
    block_bytes = sum(decoder.cache_bytes(16) for decoder in both)
    assert llm.facts.cache_bytes == llm.facts.num_blocks * block_bytes


@pytest.mark.parametrize(
    ("which", "arguments", "message"),
    [
        ("small", {"draft_method": "dflash"}, 'is a target, .* with draft_method "autoregressive"'),
        ("draft", {}, 'is a drafter: .* with draft_method "dflash"'),
        ("small", {"draft_method": "eagle"}, "draft_method 'eagle': expected one of dflash, auto"),
        (None, {}, "draft_method 'autoregressive' needs a drafter"),
        ("other", {}, "another vocabulary: it has 4096 tokens, this target 32: expected the same"),
        ("words", {}, r"another vocabulary: token 7 is 'seven', expected this target's 'w7'"),
        ("fewer", {}, r"another vocabulary: token 30 is absent, expected this target's 'w30'"),
    ],
)
def test_what_cannot_draft_is_refused(which, arguments, message, target, small, draft, tmp_path):
    checkpoint = {"small": small, "draft": draft, None: None}.get(which, tmp_path)
    if which == "other":
        tiny.make_target(tmp_path, vocab_size=4096)
    elif which in ("words", "fewer"):
        tiny.make_target(tmp_path)
        tiny.write_tokenizer(tmp_path, 32 if which == "words" else 30)
        if which == "words":
            file = tmp_path / "tokenizer.json"
            file.write_text(file.read_text().replace('"w7"', '"seven"'))
    arguments = {"draft_method": "autoregressive"} | arguments
    with pytest.raises(ValueError, match=message):
        engine.make_llm(target, checkpoint, **arguments)
