# SPDX-License-Identifier: Apache-2.0
"""Draft sampling under vLLM, on small stand-ins for its objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflash.integrations.vllm import sampling
from dflash.log import _seen

VOCAB, PADDED, H = 100, 128, 8


class Processor(SimpleNamespace):
    pass


class HeadMethod:
    pass


class Model:
    """vLLM's drafter: a head padded with rows that would win if they counted."""

    def __init__(self, d2t=None, **processor):
        plain = dict(
            soft_cap=None, logits_as_input=False, head_dtype=None, org_vocab_size=VOCAB, scale=1.0
        )
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(PADDED, H, generator=generator)
        weight[VOCAB:] *= 100
        weight[70] = weight[9]  # equal logits: the first wins
        self.lm_head = SimpleNamespace(weight=weight, tp_size=1, quant_method=HeadMethod())
        self.logits_processor = Processor(**(plain | processor))
        self.draft_id_to_target_id = d2t
        self.num_logits = 0

    def compute_logits(self, hidden):
        self.num_logits += 1
        logits = (hidden @ self.lm_head.weight[:VOCAB].T) * self.logits_processor.scale
        if self.draft_id_to_target_id is None:
            return logits
        full = logits.new_full((len(hidden), 2 * VOCAB), -torch.inf)
        full[:, torch.arange(VOCAB) + self.draft_id_to_target_id] = logits
        return full


class OwnLogits(Model):
    def compute_logits(self, hidden):
        return -super().compute_logits(hidden)


class Speculator:
    use_local_argmax_reduction = False
    acceptance_estimator = None
    max_num_reqs, num_speculative_steps = 4, 3

    def __init__(self, model=None):
        self.model = model or Model()

    def compute_draft_logits(self, hidden, step):
        return self.model.compute_logits(hidden)


class OwnDraftLogits(Speculator):
    def compute_draft_logits(self, hidden, step):
        return -self.model.compute_logits(hidden)


KNOWN = sampling.Known(Model, Processor, HeadMethod)


def forwarded(self, *args, **kwargs):
    return "vLLM's"


OLD = sampling.with_one_kernel(forwarded, KNOWN)
NEW = sampling.without_logits_record(forwarded, KNOWN, Speculator.compute_draft_logits)


def hidden_rows(rows):
    hidden = torch.randn(rows, H, generator=torch.Generator().manual_seed(1))
    if rows:
        hidden[0] = Model().lm_head.weight[9] * 10
    return hidden


@pytest.fixture(params=[False, True], ids=["logits", "head"])
def in_the_head(request, monkeypatch):
    """Whether a kernel is said to sample in the head's GEMM."""
    plan = (16, 4, 1) if request.param else None
    monkeypatch.setattr(sampling, "lm_head_sample_plan", lambda hidden, weight, vocab_size: plan)
    return request.param


@pytest.mark.parametrize("rows", [0, 1, 12, 40])
@pytest.mark.parametrize("reduced", [False, True])
def test_draft_tokens_are_the_first_maxima(rows, reduced, in_the_head):
    d2t = torch.arange(VOCAB) if reduced else None
    speculator, hidden = Speculator(Model(d2t, scale=0.5)), hidden_rows(rows)
    expected = speculator.model.compute_logits(hidden).argmax(-1)
    if rows:
        assert expected[0] == (18 if reduced else 9)
    speculator.model.num_logits = 0
    for _ in range(2):
        assert torch.equal(OLD(speculator, hidden), expected)
        assert torch.equal(NEW(speculator, hidden, 1, 2, 3, 4, 5, None, num_steps=3), expected)
    assert speculator.model.num_logits == (0 if in_the_head else 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.logits_processor, "soft_cap", 30.0),
        lambda m: setattr(m.logits_processor, "logits_as_input", True),
        lambda m: setattr(m.logits_processor, "head_dtype", torch.float64),
        lambda m: setattr(m.lm_head, "tp_size", 2),
        lambda m: setattr(m.lm_head, "quant_method", object()),
        lambda m: setattr(m, "logits_processor", SimpleNamespace(**vars(m.logits_processor))),
    ],
)
def test_a_head_that_is_more_than_a_product_makes_its_logits(change):
    model = Model()
    assert sampling.plain_head(model, KNOWN) is not None
    change(model)
    assert sampling.plain_head(model, KNOWN) is None


def test_logits_that_a_subclass_makes_are_asked_for(in_the_head):
    hidden = hidden_rows(5)
    lowest = Model().compute_logits(hidden).argmin(-1)
    assert torch.equal(OLD(Speculator(OwnLogits()), hidden), lowest)
    assert torch.equal(NEW(OwnDraftLogits(), hidden, 1, 2, 3, 4, 5, None), lowest)


def test_nothing_that_graphs_share_is_made_during_a_capture(monkeypatch, caplog):
    speculator, hidden = Speculator(), hidden_rows(5)
    expected = speculator.model.compute_logits(hidden).argmax(-1)
    monkeypatch.setattr(sampling, "is_capturing", lambda tensor: True)
    _seen.clear()
    with caplog.at_level("WARNING", "dflash"):
        assert torch.equal(OLD(speculator, hidden), expected)
    assert "is left in a graph captured" in caplog.text
    assert "_dflash_sampling" not in vars(speculator)
    monkeypatch.undo()
    OLD(speculator, hidden)  # the warm-up before a capture
    made = speculator._dflash_sampling
    monkeypatch.setattr(sampling, "is_capturing", lambda tensor: True)
    assert torch.equal(OLD(speculator, hidden), expected)
    assert speculator._dflash_sampling is made


def test_other_ways_to_sample_stay_vllms():
    hidden, record = hidden_rows(3), torch.zeros(1)
    local = Speculator()
    local.use_local_argmax_reduction = True
    assert OLD(local, hidden) == NEW(local, hidden, 1, 2, 3, 4, 5, None) == "vLLM's"
    estimating = Speculator()
    estimating.acceptance_estimator = object()
    assert NEW(estimating, hidden, 1, 2, 3, 4, 5, None) == "vLLM's"
    assert NEW(Speculator(), hidden, 1, 2, 3, 4, 5, record) == "vLLM's"
    assert NEW(Speculator(), hidden, draft_logits=record) == "vLLM's"


@pytest.mark.gpu
def test_a_captured_step_samples_what_a_replay_finds():
    """In 16 bits, with a vocabulary that Hopper samples in the head's GEMM."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    model = Model(org_vocab_size=20000)
    model.lm_head.weight = normal(20032, 64)
    model.lm_head.weight[20000:] *= 100
    model.compute_logits = lambda hidden: hidden @ model.lm_head.weight[:20000].T
    speculator, hidden = Speculator(model), normal(12, 64)
    assert sampling.plain_head(model, KNOWN) is not None
    if torch.cuda.get_device_capability()[0] == 9:
        assert sampling.lm_head_sample_plan(hidden, model.lm_head.weight) is not None
    OLD(speculator, hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = OLD(speculator, hidden)
    for _ in range(3):
        hidden.copy_(normal(12, 64))
        graph.replay()
        logits = hidden.float() @ model.lm_head.weight[:20000].float().T
        found = logits.gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(found, logits.max(-1).values, rtol=1e-2, atol=0)
