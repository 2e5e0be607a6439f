# SPDX-License-Identifier: Apache-2.0
"""A short soak of the tiny pair, and that a soak sees what it is there to see."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dflash.engine.admission import Limits
from dflash.engine.detokenizer import Detokenizer
from tests.soak import Soak, num_blocks
from tests.support import tiny
from tests.support.engine import make_llm
from tests.support.quarters import Quarter
from tests.support.traffic import REFERENCE_TOKENS

MAX_NUM_SEQS = 8


def make_texts() -> list[str]:
    choose = random.Random(3)
    lengths = [choose.randint(1, 200) for _ in range(20)]
    return [" ".join(f"w{choose.randrange(32)}" for _ in range(length)) for length in lengths]


@pytest.fixture(scope="module")
def with_eos(tmp_path_factory):
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def llm(with_eos, draft):
    return make_llm(
        with_eos,
        draft,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=num_blocks(MAX_NUM_SEQS),
    )


def make_soak(llm, seconds: float) -> Soak:
    return Soak(llm, make_texts(), seconds / 60, rate=50.0, seed=0, exact=True)


def test_a_short_soak(llm):
    soak = make_soak(llm, 12.0)
    soak.run()
    assert soak.failures == []
    total = Quarter.sum_of(soak.quarters)
    assert total.requests == total.finished + total.left + total.refused > 100
    assert total.references == total.references_equal > 10


KEPT = []


def keep_an_object(llm, monkeypatch):
    add = llm.core.scheduler.add
    monkeypatch.setattr(
        llm.core.scheduler, "add", lambda request: add(KEPT.append(request) or request)
    )


def keep_a_row(llm, monkeypatch):
    scheduler = llm.core.scheduler
    finish = scheduler.finish

    def keep_one(request, reason):
        finish(request, reason)
        if len(scheduler._free_rows) == MAX_NUM_SEQS:
            scheduler._free_rows.pop()

    monkeypatch.setattr(scheduler, "finish", keep_one)


def keep_a_block(llm, monkeypatch):
    pool, kept = llm.core.scheduler.pool, []
    free = pool.free

    def keep_one(blocks):
        kept.extend(blocks[:1] if not kept else [])
        free([block for block in blocks if block not in kept])

    monkeypatch.setattr(pool, "free", keep_one)


def change_references_in_company(llm, monkeypatch):
    commit = llm.core._commit

    def other(request, row, *arguments):
        if len(llm._jobs) > 1 and request.params.max_tokens == REFERENCE_TOKENS:
            row[3 : 3 + row[1]] = [token ^ 8 for token in row[3 : 3 + row[1]]]
        return commit(request, row, *arguments)

    monkeypatch.setattr(llm.core, "_commit", other)


def lose_text(llm, monkeypatch):
    push = Detokenizer.push
    monkeypatch.setattr(Detokenizer, "push", lambda *arguments: push(*arguments)[1:])


def refuse_a_good_prompt(llm, monkeypatch):
    check = Limits.check_prompt

    def stricter(limits, prompt):
        check(limits, prompt)
        if len(prompt) == 1:
            raise ValueError("one token is too few")

    monkeypatch.setattr(Limits, "check_prompt", stricter)


def take_a_bad_parameter(llm, monkeypatch):
    check = Limits.check_ids
    monkeypatch.setattr(
        Limits, "check_ids", lambda limits, params: params.logit_bias or check(limits, params)
    )


@pytest.mark.parametrize(
    "sabotage,message",
    [
        (keep_an_object, "objects are alive"),
        (keep_a_row, "7 of 8 rows are free"),
        (keep_a_block, "blocks are free"),
        (change_references_in_company, "reference 0|reference 1|reference 2"),
        (lose_text, "chunks say"),
        (refuse_a_good_prompt, "one token is too few"),
        (take_a_bad_parameter, "should have been refused"),
    ],
)
def test_a_soak_sees(sabotage, message, llm, monkeypatch):
    soak = make_soak(llm, 6.0)
    sabotage(llm, monkeypatch)
    soak.run()
    KEPT.clear()
    assert any(part in failure for failure in soak.failures for part in message.split("|"))


def quarters(drafts=(100, 100, 100, 100), rss=(500.0, 500.0, 500.0, 500.0)) -> list[Quarter]:
    return [
        Quarter(
            left=1, refused=1, cached_tokens=1, preemptions=1, references=1, reference_drafts=d,
            reference_drafts_alone=100, reference_acceptance_length_alone=3.0, memory={"RSS": r},
        )
        for d, r in zip(drafts, rss, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "what,message",
    [
        (quarters(), None),
        (quarters(drafts=(100, 101, 100, 101)), None),
        (quarters(drafts=(100, 103, 100, 100)), "AL of the references is not steady"),
        (quarters(rss=(500.0, 510.0, 520.0, 530.0)), None),
        (quarters(rss=(500.0, 510.0, 520.0, 532.0)), "RSS grew from 500 to 532 MiB"),
        ([replace(q, preemptions=0) for q in quarters()], "preemptions: none"),
        ([replace(q, references=0) for q in quarters()], "without a reference"),
    ],
)
def test_a_soak_judges_its_quarters(what, message, llm):
    soak = make_soak(llm, 1.0)
    soak.quarters = what
    soak._check_run()
    assert (message is None) == (not soak.failures)
    assert message is None or message in soak.failures[0]
