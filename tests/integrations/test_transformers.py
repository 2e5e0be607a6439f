# SPDX-License-Identifier: Apache-2.0
"""`dflash.integrations.transformers.generate` against model.generate, on the model's own weights."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from dflash.checkpoints.in_memory import adopt_target
from dflash.engine.memory import tensor_bytes
from dflash.errors import CheckpointError
from dflash.integrations import transformers as integration
from dflash.integrations.generation import read_generation
from dflash.integrations.transformers import generate
from dflash.models.linear import linear
from tests.support import demo, tiny

LONGEST = 3  # N of the tiny drafter


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return str(tiny.make_draft(tmp_path_factory.mktemp("draft")))


def make_model(model_type="qwen3", **changes):
    config = AutoConfig.for_model(model_type, **(tiny.TARGET_SHAPE | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    tiny.randomise(model, 0)
    return model


@pytest.fixture
def model():
    return make_model()


def batch(*lengths, seed=0):
    """Left-padded prompts with a mask, as a tokenizer gives them."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 32, (len(lengths), max(lengths)), generator=rng)
    starts = max(lengths) - torch.tensor(lengths)
    mask = (torch.arange(max(lengths)) >= starts[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def greedy(model, inputs, **arguments):
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | arguments
    return model.generate(**inputs, **settings)


def drafted(model, inputs, draft, **arguments):
    settings = {"max_new_tokens": 20, "pad_token_id": 0, "num_speculative_tokens": LONGEST}
    return generate(model, inputs, draft, **(settings | arguments))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_answers_are_those_of_transformers(model_type, tied, draft):
    model = make_model(model_type, tie_word_embeddings=tied)
    for seed in range(4):
        inputs = batch(7, 1, 12, 40, seed=seed)
        expected = greedy(model, inputs, eos_token_id=[1, 9])
        assert torch.equal(drafted(model, inputs, draft, eos_token_id=[1, 9]), expected)
        assert integration.statistics(model).num_draft_tokens > 0


def test_answers_end_where_those_of_transformers_do(model, draft):
    inputs = batch(5, 9)
    first = greedy(model, inputs)[:, 9:]
    eos = int(first[0, 4])
    ended = drafted(model, inputs, draft, eos_token_id=eos, pad_token_id=7)
    assert torch.equal(ended, greedy(model, inputs, eos_token_id=eos, pad_token_id=7))
    assert eos in ended[0, 9:] and ended.shape[1] <= 29
    for arguments in (
        {"max_new_tokens": None, "max_length": 14},
        {"max_new_tokens": 1},
        {"min_new_tokens": 12, "eos_token_id": eos},
        {"repetition_penalty": 1.7},
    ):
        expected = greedy(model, inputs, **arguments)
        assert torch.equal(drafted(model, inputs, draft, **arguments), expected), arguments


def test_a_generation_config_is_read_like_transformers_reads_it(model, draft):
    inputs = batch(6)
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=1, pad_token_id=0)
    arguments = {"generation_config": config, "pad_token_id": None, "max_new_tokens": None}
    expected = model.generate(**inputs, generation_config=config)
    assert torch.equal(drafted(model, inputs, draft, **arguments), expected)
    ids = inputs["input_ids"]
    assert torch.equal(drafted(model, ids, draft, max_new_tokens=None), greedy(model, inputs))


def test_the_models_own_config_fills_what_a_given_one_leaves_open(model, draft):
    inputs = batch(8)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)
    model.generation_config.eos_token_id = [int(plain[0, 12])]
    model.generation_config.repetition_penalty = 1.3
    config = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0)
    expected = model.generate(**inputs, generation_config=config)
    arguments = {"max_new_tokens": None, "pad_token_id": None, "generation_config": config}
    assert torch.equal(drafted(model, inputs, draft, **arguments), expected)
    assert not torch.equal(expected, plain)


def test_a_quantized_drafter_answers_the_same(model, draft):
    inputs = batch(7, 12)
    arguments = {"engine_args": {"draft_quantization": "fp8"}}
    assert torch.equal(drafted(model, inputs, draft, **arguments), greedy(model, inputs))
    assert integration._sessions[model]._draft[1].kv_proj is not None


def test_only_special_tokens_of_old_configs_fill_a_given_one(monkeypatch):
    old = GenerationConfig(eos_token_id=5, repetition_penalty=1.3)
    old.transformers_version = "4.40.0"
    given = GenerationConfig(max_new_tokens=4)
    for installed, penalty in (("4.57.0", 1.0), ("5.0.0", 1.3)):
        monkeypatch.setattr(transformers, "__version__", installed)
        params = read_generation(old, given, {"max_length": None}, 3).params
        assert (params.repetition_penalty, params.stop_token_ids) == (penalty, (5,))


def test_twenty_tokens_in_all_may_be_asked_for(model, draft):
    inputs = batch(8)
    model.generation_config.eos_token_id = None
    expected = greedy(model, inputs, max_new_tokens=None, max_length=20)
    actual = drafted(model, inputs, draft, max_new_tokens=None, max_length=20)
    assert torch.equal(actual, expected) and actual.shape[1] == 20


def test_answers_may_be_trained_on(model, draft):
    answer = drafted(model, batch(5), draft)
    assert not answer.is_inference()
    model(answer).logits.sum().backward()


def test_a_given_length_is_a_limit(model, draft):
    with pytest.raises(ValueError, match="may take 30 tokens, the limit is 24"):
        drafted(model, batch(10), draft, engine_args={"max_model_len": 24})


def test_what_was_built_can_be_let_go(model, draft):
    with pytest.raises(ValueError, match="has not been called"):
        integration.statistics(model)
    drafted(model, batch(5), draft)
    assert integration.statistics(model).num_output_tokens == 20
    integration.release(model)
    with pytest.raises(ValueError, match="has not been called"):
        integration.statistics(model)


def test_no_weight_is_copied(model, draft):
    """Every tensor of the target is a parameter of the model, at its address; a second copy would be new bytes."""
    _, weights = adopt_target(model)
    owned = {p.data_ptr(): p for p in model.parameters()}
    tensors = [weights.embed_tokens, weights.norm, weights.lm_head]
    for layer in weights.layers:
        for value in vars(layer).values():
            tensors += value if isinstance(value, tuple) else [value]
    tensors = [t for t in tensors if t is not None]
    assert {t.data_ptr() for t in tensors} == owned.keys()
    assert all(torch.equal(t, owned[t.data_ptr()]) for t in tensors)
    drafted(model, batch(4), draft)
    session = integration._sessions[model]
    target = session._engine.core._step.target
    tables = tensor_bytes(target.decoder.rope_table, target.decoder.caches, target.decoder.backends)
    own = tensor_bytes(list(model.parameters()))
    assert tensor_bytes(target, list(model.parameters())) == own + tables


def test_weights_that_their_owner_changes_are_seen(model, draft):
    inputs = batch(5, 8)
    before = drafted(model, inputs, draft)
    tiny.randomise(model, 5)
    after = drafted(model, inputs, draft)
    assert torch.equal(after, greedy(model, inputs)) and not torch.equal(after, before)
    session = integration._sessions[model]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    assert torch.equal(drafted(model, inputs, draft), greedy(model, inputs))
    assert integration._sessions[model] is not session


def test_one_engine_serves_calls_until_they_outgrow_it(model, draft):
    drafted(model, batch(5), draft)
    session = integration._sessions[model]
    engine = session._engine
    drafted(model, batch(60), draft)
    assert session._engine is engine
    for inputs in (batch(3, 5, 9), batch(300)):
        assert torch.equal(drafted(model, inputs, draft), greedy(model, inputs))
        assert session._engine is not engine
        engine = session._engine
    assert torch.equal(drafted(model, batch(5), draft), greedy(model, batch(5)))
    assert session._engine is engine and integration._sessions[model] is session
    inputs = batch(*range(1, 12))  # more than run at once
    assert torch.equal(drafted(model, inputs, draft), greedy(model, inputs))


def test_a_model_without_owner_leaves_nothing_behind(draft):
    model = make_model()
    drafted(model, batch(5), draft)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert all(ref() is not None for ref in integration._sessions.keyrefs())


def test_sampled_answers_follow_torchs_seed(model, draft):
    arguments = {"do_sample": True, "temperature": 0.8, "num_return_sequences": 3}

    def sampled(seed):
        torch.manual_seed(seed)
        return drafted(model, batch(5, 9), draft, **arguments)

    first = sampled(0)
    assert first.shape[0] == 6 and torch.equal(first[0, :9], first[2, :9])
    assert torch.equal(first, sampled(0)) and not torch.equal(first, sampled(1))
    assert not torch.equal(first[0], first[1])


def test_an_interrupted_call_leaves_an_engine_that_works(model, draft, monkeypatch):
    inputs = batch(5, 9)
    expected = drafted(model, inputs, draft)
    core = integration._sessions[model]._engine.core
    step, calls = core.step, []

    def interrupted():
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drafted(model, inputs, draft)
    monkeypatch.undo()
    assert not core.scheduler.has_work
    assert torch.equal(drafted(model, inputs, draft), expected)


def test_threads_take_turns(model, draft):
    batches = [batch(5, 9, seed=seed) for seed in range(6)]
    expected = [greedy(model, inputs) for inputs in batches]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda inputs: drafted(model, inputs, draft), batches))
    assert all(torch.equal(a, e) for a, e in zip(answers, expected, strict=True))


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"num_beams": 2}, "num_beams=2 is not served"),
        ({"stop_strings": ["x"]}, r"stop_strings=\['x'\] is not served"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size=2 is not served"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True is not served"),
        ({"streamer": object()}, "streamer: not a generation parameter"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"max_new_tokens": None, "max_length": 5}, "max_length=5 leaves no room behind 5"),
        ({"max_new_tokens": 2000}, "2005 tokens, the limit is 1024"),
        ({"num_speculative_tokens": 9}, "past what this drafter was trained for"),
        ({"engine_args": {"dtype": "int8"}}, "dtype 'int8'"),
        ({"engine_args": {"dtype": "bfloat16"}}, "dtype 'bfloat16', but the model's weights are"),
        ({"engine_args": {"frob": 1}}, "engine_args: frob: no field of EngineArgs"),
    ],
)
def test_what_is_not_served_is_refused_by_name(model, draft, arguments, message):
    with pytest.raises(ValueError, match=message):
        drafted(model, batch(5), draft, **arguments)


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_call_without_a_drafter_is_refused(model, nothing):
    with pytest.raises(ValueError, match="draft: expected a folder, a hub id or"):
        drafted(model, batch(5), nothing)


def test_inputs_that_are_no_batch_are_refused(model, draft):
    with pytest.raises(ValueError, match=r"expected integer input_ids \[B, T\]"):
        drafted(model, torch.zeros(3, dtype=torch.int64), draft)
    inputs = batch(5) | {"attention_mask": torch.ones(1, 4)}
    with pytest.raises(ValueError, match=r"attention_mask: expected \[1, 5\], got \[1, 4\]"):
        drafted(model, inputs, draft)


class Scaled(torch.nn.Linear):
    """What an adapter puts in a layer's place."""


def test_models_that_cannot_be_adopted_are_refused():
    gpt2 = AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=32)
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel is not supported"):
        adopt_target(AutoModelForCausalLM.from_config(gpt2))
    model = make_model()
    model.model.layers[1].mlp.up_proj = Scaled(64, 96, bias=False)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj is a Scaled"):
        adopt_target(model)
    with pytest.raises(CheckpointError, match="parameters are on meta: expected one device"):
        adopt_target(make_model().to("meta"))
    mixed = make_model()
    mixed.model.norm.half()
    with pytest.raises(CheckpointError, match="parameters are float16, float32"):
        adopt_target(mixed)


class ScaledEmbedding(torch.nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


def test_a_layer_that_computes_something_else_is_refused(model):
    norm = type(model.model.norm)
    model.model.embed_tokens = ScaledEmbedding(*model.model.embed_tokens.weight.shape)
    message = "embed_tokens is a ScaledEmbedding: expected a plain nn.Embedding"
    with pytest.raises(CheckpointError, match=message):
        adopt_target(model)
    model = make_model()
    model.lm_head = torch.nn.Identity()
    with pytest.raises(
        CheckpointError, match=r"lm_head is a Identity: expected a plain nn\.Linear"
    ):
        adopt_target(model)
    model = make_model()
    model.model.norm = type("OtherNorm", (norm,), {})(model.config.hidden_size)
    with pytest.raises(CheckpointError, match="norm is a OtherNorm: expected a plain RMSNorm"):
        adopt_target(model)


@pytest.mark.parametrize("tile_rows", [None, 4])
def test_matrices_below_each_other_are_one_matrix(tile_rows):
    x = torch.randn(8, 16)
    weights = [torch.randn(rows, 16) for rows in (5, 1, 7)]
    biases = [torch.randn(rows) for rows in (5, 1, 7)]
    expected = linear(x, torch.cat(weights), torch.cat(biases), tile_rows)
    assert torch.equal(linear(x, tuple(weights), tuple(biases), tile_rows), expected)


def test_the_demo_pair_answers_like_transformers():
    model, tokenizer = demo.transformers_target(), demo.tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.eos_token
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in ("Name three rivers.", "Write a Python function that adds two numbers.")
    ]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert torch.equal(generate(model, inputs, "demo", max_new_tokens=40), expected)
    assert integration.statistics(model).num_accepted_tokens > 20
