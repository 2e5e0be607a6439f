# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for: n, logprobs, stops, penalties, defaults; who fails when one fails; what can be seen."""

from __future__ import annotations

import asyncio
import json
import logging
import math

import pytest
import torch
from prometheus_client import generate_latest

from dflash import SamplingParams
from dflash.engine import metrics as engine_metrics
from dflash.errors import DflashError
from tests.support import tiny
from tests.support.engine import greedy_params, make_llm

from .conftest import NUM_TOKENS, PROMPTS


@pytest.fixture
def llm(target, draft):
    return make_llm(target, draft, max_model_len=128)


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_n_sequences_have_successive_seeds(llm):
    params = {"temperature": 1.2, "max_tokens": 12}
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(n=3, seed=7, **params))
    alone = [
        llm.generate(PROMPTS[:1], SamplingParams(seed=7 + i, **params))[0].outputs[0]
        for i in range(3)
    ]
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in alone]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3
    assert output.usage.completion_tokens == 36 == output.statistics.num_output_tokens
    assert output.usage.total_tokens == 36 + len(PROMPTS[0])


def test_a_stream_of_n_sequences_says_whose_a_chunk_is(llm):
    params = SamplingParams(n=2, seed=1, max_tokens=10)
    texts, last = ["", ""], None
    for chunk in llm.stream(PROMPTS[0], params):
        texts[chunk.index] += chunk.text
        assert last is None
        last = chunk.finished
    assert [output.text for output in last.outputs] == texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_models_own(temperature, llm, target):
    """Against transformers' logits; processing changes what is sampled, not what is reported."""
    params = SamplingParams(
        temperature=temperature, top_k=3, seed=3, max_tokens=NUM_TOKENS, logprobs=4,
        presence_penalty=0.5,
    )  # fmt: skip
    chunks = list(llm.stream(PROMPTS[3], params))
    output = chunks[-1].finished.outputs[0]
    assert output.logprobs == [entry for chunk in chunks for entry in chunk.logprobs]
    model = tiny.load_target(target)
    ids = torch.tensor([PROMPTS[3] + output.token_ids])
    with torch.no_grad():
        expected = model(ids).logits[0, len(PROMPTS[3]) - 1 : -1].log_softmax(-1)
    assert len(output.logprobs) == NUM_TOKENS
    for token, entry, row in zip(output.token_ids, output.logprobs, expected, strict=True):
        order = row.argsort(descending=True).tolist()
        assert set(entry) == {token, *order[:4]}
        for t, logprob in entry.items():
            assert math.isclose(logprob.logprob, row[t], abs_tol=1e-4)
            assert logprob.rank == order.index(t) + 1
    assert math.isclose(
        output.cumulative_logprob,
        expected.gather(1, ids[0, -NUM_TOKENS:, None]).sum(),
        rel_tol=1e-4,
    )


def test_logprobs_of_a_neighbour_change_nothing(llm, answers):
    params = [greedy_params(NUM_TOKENS, logprobs=0 if i == 1 else None) for i in range(4)]
    outputs = llm.generate(PROMPTS, params)
    assert tokens_of(outputs) == answers
    assert [o.outputs[0].logprobs is None for o in outputs] == [True, False, True, True]
    assert all(
        list(entry) == [t]
        for t, entry in zip(answers[1], outputs[1].outputs[0].logprobs, strict=True)
    )


def test_penalties_follow_transformers(target, draft):
    """Greedy with a repetition penalty, drafted blocks included, is transformers' token by token."""
    model = tiny.load_target(target)
    llm = make_llm(target, draft, max_model_len=128)
    for prompt in PROMPTS:
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, repetition_penalty=1.3
        )[0, len(prompt) :].tolist()  # fmt: skip
        (output,) = llm.generate([prompt], greedy_params(NUM_TOKENS, repetition_penalty=1.3))
        assert output.outputs[0].token_ids == expected


def test_frequency_penalty_never_repeats_when_it_is_huge(llm):
    bias = dict.fromkeys((5, 6, 7), 100.0)
    params = greedy_params(3, logit_bias=bias, presence_penalty=2.0, frequency_penalty=2.0)
    (output,) = llm.generate(PROMPTS[:1], params)
    assert set(output.outputs[0].token_ids) <= {5, 6, 7}


def test_min_tokens_bans_stop_tokens_and_strings(llm, answers):
    end = next(i for i in range(2, 20) if answers[0][i] not in answers[0][:i])
    stop = answers[0][end]
    for minimum in (0, 1, 5, 9):
        params = greedy_params(20, stop_token_ids=[stop], min_tokens=minimum)
        (output,) = llm.generate(PROMPTS[:1], params)
        tokens = output.outputs[0].token_ids
        assert stop not in tokens[:minimum] and len(tokens) >= minimum
        if minimum == 0:
            assert tokens == answers[0][: end + 1] and output.outputs[0].stop_reason == stop
    params = greedy_params(20, stop=f"w{stop}", min_tokens=end + 1)
    (output,) = llm.generate(PROMPTS[:1], params)
    assert len(output.outputs[0].token_ids) > end + 1


def test_stop_strings_may_stay_in_the_text(llm, answers):
    word = f"w{answers[0][4]}"
    texts = [
        llm.generate(PROMPTS[:1], greedy_params(20, stop=word, include_stop_str_in_output=keep))[0]
        .outputs[0]
        for keep in (False, True)
    ]  # fmt: skip
    assert texts[1].text == texts[0].text + word
    assert texts[0].stop_reason == word and texts[0].finish_reason == "stop"


def test_generation_config_is_the_default(draft, tmp_path):
    folder = tiny.make_target(tmp_path, eos_token_id=None)
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_new_tokens": 9,
    }
    (folder / "generation_config.json").write_text(json.dumps(config))
    llm = make_llm(folder, draft)
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=9)
    assert len(llm.generate([3, 4])[0].outputs[0].token_ids) == 9
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "top_k": 4}))
    assert make_llm(folder, draft).get_default_sampling_params() == SamplingParams(temperature=0.0)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": -3}))
    assert make_llm(folder, draft).get_default_sampling_params() == SamplingParams()


def test_a_failing_detokenizer_ends_its_request_alone(llm, answers, monkeypatch):
    decode = llm.tokenizer.decode
    poison = answers[1][5]
    assert all(poison not in answers[i][:5] for i in (0, 2, 3))

    def failing(ids, **arguments):
        if poison in ids and answers[1][0] in ids[:1]:
            raise RuntimeError("bad bytes")
        return decode(ids, **arguments)

    original = llm._jobs

    class Tokenizer:
        bos_token = None
        decode = staticmethod(failing)

        @staticmethod
        def encode(text, **arguments):
            return llm_tokenizer.encode(text, **arguments)

    llm_tokenizer = llm.tokenizer
    streams = [llm.stream(PROMPTS[0], greedy_params(NUM_TOKENS))]
    monkeypatch.setattr(llm, "tokenizer", Tokenizer)
    with pytest.raises(RuntimeError, match="bad bytes"):
        list(llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS)))
    assert [t for chunk in streams[0] for t in chunk.token_ids] == answers[0]
    assert not original and not llm.core.scheduler.has_work


def test_a_failing_callback_ends_its_request_alone(llm, answers):
    seen: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}

    def callback(number, chunk):
        if number == 2 and seen[2]:
            raise KeyError("callback")
        seen[number] += chunk.token_ids

    outputs = llm.generate(PROMPTS, greedy_params(NUM_TOKENS), callback)
    for i, output in enumerate(outputs):
        (completion,) = output.outputs
        if i == 2:
            assert completion.finish_reason == "error" and isinstance(completion.error, KeyError)
            assert completion.token_ids == answers[i][: len(completion.token_ids)]
        else:
            assert completion.token_ids == answers[i] == seen[i]
    assert not llm.core.scheduler.has_work and not llm._jobs


def test_a_failing_step_spares_those_that_wait(target, draft, answers, monkeypatch):
    llm = make_llm(target, draft, max_num_seqs=1)

    async def client(i):
        tokens = []
        async for chunk in llm.stream_async(PROMPTS[i], greedy_params(NUM_TOKENS)):
            tokens += chunk.token_ids
        return tokens

    async def run():
        return await asyncio.gather(*(client(i) for i in range(3)), return_exceptions=True)

    propose, calls = llm.core._step.speculator.propose, []

    def fail_once(*arguments, **named):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        propose(*arguments, **named)

    monkeypatch.setattr(llm.core._step.speculator, "propose", fail_once)
    results = asyncio.run(run())
    failed = [r for r in results if isinstance(r, Exception)]
    assert len(failed) == 1 and isinstance(failed[0], DflashError)
    assert [r for r in results if not isinstance(r, Exception)] == answers[1:3]


def test_a_prompt_finds_the_prefix_of_an_earlier_one(llm):
    long = (PROMPTS[3] * 3)[:48]
    first, second = (llm.generate([[*long, i]], greedy_params(4))[0] for i in (5, 6))
    assert first.usage.cached_tokens == 0 and second.usage.cached_tokens == 48
    fresh = llm.without_draft().generate([[*long, 6]], greedy_params(4))[0]
    assert second.outputs[0].token_ids == fresh.outputs[0].token_ids


def test_the_drafters_prefix_is_its_own(target, draft, answers):
    """A hit restores the drafter's K/V too: the same blocks are proposed and accepted."""
    llm = make_llm(target, draft, kv_block_size=4)
    runs = [llm.generate([PROMPTS[3]], greedy_params(NUM_TOKENS))[0] for _ in range(2)]
    assert runs[1].usage.cached_tokens == 16
    assert tokens_of(runs) == [answers[3]] * 2
    steps = [run.statistics.num_accepted_tokens_per_pos for run in runs]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"kv_cache_memory_bytes": 1 << 16}, "needs .* memory allows"),
        ({"gpu_memory_utilization": 0.01}, "memory allows 0.*limit .* weights .* logits"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override must be >= 2"),
        ({"inter_token_latency_target_ms": 0}, "inter_token_latency_target_ms must be > 0"),
        ({"inter_token_latency_target_ms": math.inf}, "inter_token_latency_target_ms must be > 0"),
        ({"max_num_seqs": 2.5}, "max_num_seqs: expected an integer, got 2.5"),
        ({"max_num_seqs": None}, "max_num_seqs: expected an integer, got None"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens: expected an integer"),
        ({"kv_cache_memory_bytes": 4e9}, "kv_cache_memory_bytes: expected an integer"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens: expected an integer"),
        ({"seed": None}, "seed: expected an integer, got None"),
        ({"seed": 1.5}, "seed: expected an integer, got 1.5"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype 'int4': expected one of auto, fp8"),
    ],
)
def test_an_impossible_budget_says_its_figures(arguments, message, target, draft):
    with pytest.raises((ValueError, DflashError), match=message):
        make_llm(target, draft, **({"max_model_len": 1024} | arguments))


def test_the_memory_profile_adds_up(llm):
    profile = llm.facts.memory
    weights = sum(t.numel() * 4 for t in tiny.load_target(llm.args.model).parameters())
    assert profile.weights > weights
    assert profile.logits > 0 and profile.buffers > 0 and profile.activations > 0
    assert llm.facts.cache_bytes <= profile.available
    assert "weights" in str(profile) and "for K/V" in str(profile)


@pytest.mark.parametrize("which", ["kv_cache_dtype", "draft_kv_cache_dtype"])
def test_fp8_caches(which, target, draft, answers):
    """The drafter's cache changes no token; the target's only rounds its keys and values."""
    llm = make_llm(target, draft, max_model_len=128, **{which: "fp8"})
    outputs = tokens_of(llm.generate(PROMPTS, greedy_params(NUM_TOKENS)))
    step = llm.core._step
    decoder = step.target.decoder if which == "kv_cache_dtype" else step.speculator.drafter.decoder
    assert decoder.caches[0].key.dtype == torch.float8_e4m3fn
    if which == "draft_kv_cache_dtype":
        assert outputs == answers
        return
    plain = llm.without_draft()
    assert tokens_of(plain.generate(PROMPTS, greedy_params(NUM_TOKENS))) == outputs


def test_metrics_under_vllms_names(llm):
    (output,) = llm.generate(PROMPTS[:1], greedy_params(NUM_TOKENS))
    stream = llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS))
    next(stream)
    stream.close()
    samples = {}
    for line in generate_latest(llm.metrics.registry).decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name.replace(f'model_name="{llm.args.model}"', "").replace("{}", "")] = float(
                value
            )
    statistics = output.statistics
    # The closed stream had its first token and at most one block.
    assert samples["dflash:spec_decode_num_drafts_total"] - statistics.num_drafts in (0, 1)
    first = 'dflash:spec_decode_num_accepted_tokens_per_pos_total{,position="0"}'
    keys = [
        key
        for key in samples
        if key.startswith("dflash:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert len(keys) == 3, (first, keys)
    assert samples["dflash:time_to_first_token_seconds_count"] == 2
    assert samples["dflash:prompt_tokens_total"] == len(PROMPTS[0]) + len(PROMPTS[1])
    reasons = {k: v for k, v in samples.items() if k.startswith("dflash:request_success_total")}
    assert sum(reasons.values()) == 2
    assert sum(v for k, v in reasons.items() if "abort" in k) == 1
    assert samples["dflash:num_requests_running"] >= 0


def test_a_line_in_the_log_now_and_then(llm, caplog, monkeypatch):
    monkeypatch.setattr(engine_metrics, "LOG_SECONDS", 0.0)
    caplog.set_level(logging.INFO, logger="dflash")
    llm.generate(PROMPTS, greedy_params(8))
    lines = [r.getMessage() for r in caplog.records if "generation" in r.getMessage()]
    assert lines and "AL " in lines[-1] and "prefix hits" in lines[-1] and "K/V in use" in lines[-1]


def test_streams_share_a_batch_and_closing_one_frees_it(llm, answers):
    async def run():
        streams = [llm.stream_async(p, greedy_params(NUM_TOKENS)) for p in PROMPTS]
        first = [await anext(stream) for stream in streams]
        await streams[2].aclose()
        assert len(llm.core.scheduler.running) == 3
        rest = []
        for stream in (streams[0], streams[1], streams[3]):
            rest.append([t async for chunk in stream for t in chunk.token_ids])
        return first, rest

    first, rest = asyncio.run(run())
    for i, tokens in zip((0, 1, 3), rest, strict=True):
        assert first[i].token_ids + tokens == answers[i]
    assert not llm._jobs and not llm.core.scheduler.has_work


def test_an_llm_outlives_an_event_loop(llm, answers):
    async def run(i):
        return [
            t async for c in llm.stream_async(PROMPTS[i], greedy_params(8)) for t in c.token_ids
        ]

    assert [asyncio.run(run(i)) for i in range(2)] == [answers[0][:8], answers[1][:8]]


def test_what_a_failed_request_gives_back_is_whole(llm, monkeypatch):
    """Tokens, logprobs and text are those handed over before the failure."""
    decode, calls = llm.tokenizer.decode, []

    def failing(ids, **arguments):
        calls.append(1)
        if len(calls) == 30:
            raise RuntimeError("bad bytes")
        return decode(ids, **arguments)

    monkeypatch.setattr(llm.tokenizer, "decode", failing, raising=False)
    seen: dict[int, list[int]] = {0: [], 1: []}
    outputs = llm.generate(
        PROMPTS[:2],
        greedy_params(NUM_TOKENS, logprobs=1),
        lambda number, chunk: seen[number].extend(chunk.token_ids),
    )
    (failed,) = (i for i in (0, 1) if outputs[i].outputs[0].finish_reason == "error")
    completion = outputs[failed].outputs[0]
    assert completion.token_ids == seen[failed]
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.cumulative_logprob < 0


def test_a_callback_that_fails_at_the_last_chunk_is_an_error_too(llm, answers):
    def callback(number, chunk):
        if number == 1 and chunk.finished is not None:
            raise KeyError("last")

    good, bad = llm.generate(PROMPTS[:2], greedy_params(NUM_TOKENS), callback)
    assert good.outputs[0].finish_reason == "length" and good.outputs[0].error is None
    assert bad.outputs[0].finish_reason == "error"
    assert isinstance(bad.outputs[0].error, KeyError)
    assert bad.outputs[0].token_ids == answers[1]
    assert not llm.core.scheduler.has_work and not llm._jobs


def test_the_cached_tokens_of_n_sequences_are_the_prompts(llm):
    prompt = (PROMPTS[3] * 3)[:49]
    llm.generate([prompt], greedy_params(2))
    (output,) = llm.generate([prompt], SamplingParams(n=3, seed=1, max_tokens=4))
    assert output.usage.cached_tokens == 48 == output.num_cached_tokens
    assert output.statistics.num_cached_tokens == 3 * 48


@pytest.mark.parametrize("end", ["stop string", "closed"])
def test_gauges_say_what_is_not_what_was(end, llm, answers):
    """A request that ends between two steps is neither running nor in the cache."""
    if end == "closed":
        stream = llm.stream(PROMPTS[0], greedy_params(NUM_TOKENS))
        next(stream)
        stream.close()
    else:
        llm.generate(PROMPTS[:1], greedy_params(NUM_TOKENS, stop=f"w{answers[0][4]}"))
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        labels = {"model_name": llm.args.model}
        assert llm.metrics.registry.get_sample_value(f"dflash:{name}", labels) == 0


def test_without_draft_forgets_what_only_a_drafter_needs(target, draft, answers):
    llm = make_llm(
        target,
        draft,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(0.5, 0.5, 0.5),
    )
    plain = llm.without_draft()
    assert plain.args.draft is None
    assert tokens_of(plain.generate(PROMPTS, greedy_params(NUM_TOKENS))) == answers
