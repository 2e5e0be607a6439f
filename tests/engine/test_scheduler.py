# SPDX-License-Identifier: Apache-2.0
"""Scheduler and block pool under random traffic, with a device that only remembers what each slot holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.engine.kv_cache import ROOT_PREFIX, BlockPool
from dflash.engine.request import Request
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.scheduler import Schedule, Scheduler


@dataclass(frozen=True)
class Arrival:
    """A request that comes before step `step` and, maybe, is aborted before step `aborted_at`."""

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    aborted_at: int | None = None


@dataclass(frozen=True)
class Case:
    kv_block_size: int
    num_query_per_req: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_budget: int | None
    spare_blocks: int  # beyond what the largest request needs alone
    prefix_caching: bool
    arrivals: list[Arrival]
    acceptance: list[int]  # tokens committed by successive iterations, cycled
    num_steps_ahead: int = 0  # passes that the host does not wait for

    def num_blocks(self) -> int:
        lookahead = (2 + self.num_steps_ahead) * self.num_query_per_req
        slots = max(len(a.prompt) + a.max_tokens + lookahead for a in self.arrivals)
        return 1 + -(-slots // self.kv_block_size) + self.spare_blocks


@st.composite
def cases(draw) -> Case:
    # Few tokens and common beginnings: prefixes are found often.
    common = draw(st.lists(st.integers(0, 1), max_size=40))
    prompts = st.tuples(st.integers(0, len(common)), st.lists(st.integers(0, 1), max_size=12)).map(
        lambda cut: (*common[: cut[0]], *cut[1], 2)
    )
    arrivals = st.builds(
        Arrival,
        step=st.integers(0, 30),
        prompt=prompts,
        max_tokens=st.integers(1, 25),
        aborted_at=st.none() | st.integers(0, 60),
    )
    return Case(
        kv_block_size=draw(st.sampled_from([1, 16])),
        num_query_per_req=draw(st.integers(1, 5)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.integers(1, 50)),
        prefill_budget=draw(st.none() | st.integers(0, 20)),
        spare_blocks=draw(st.sampled_from([0, 0, 1, 2, 5, 30])),
        prefix_caching=draw(st.booleans()),
        arrivals=draw(st.lists(arrivals, min_size=1, max_size=8)),
        acceptance=draw(st.lists(st.integers(1, 5), min_size=1, max_size=7)),
        num_steps_ahead=draw(st.integers(0, 1)),
    )


@dataclass
class Simulation:
    """Runs a case and checks after every schedule; slots hold the tokens up to their own, or scratch.

    `device` has what each request really says; the host reads it when it has num_steps_ahead passes more in flight.
    """

    case: Case
    scheduler: Scheduler = field(init=False)
    requests: list[Request] = field(default_factory=list)
    held: dict[int, object] = field(default_factory=dict)
    num_steps: int = 0
    num_hits: int = 0
    device: dict[int, list[int]] = field(default_factory=dict)  # outputs by request_id
    flights: list[list[tuple[Request, list[int]]]] = field(default_factory=list)
    aborted_at: dict[int, int | None] = field(default_factory=dict)
    progress: tuple[int, ...] = ()  # of the oldest request
    progress_since: int = 0

    def __post_init__(self) -> None:
        case = self.case
        pool = BlockPool(case.num_blocks(), case.kv_block_size, case.prefix_caching)
        self.scheduler = Scheduler(
            pool,
            case.max_num_seqs,
            case.max_num_batched_tokens,
            case.num_query_per_req,
            case.num_steps_ahead,
        )

    def run(self) -> None:
        arrivals = sorted(self.case.arrivals, key=lambda a: a.step)
        while arrivals or self.scheduler.has_work:
            while arrivals and arrivals[0].step <= self.num_steps:
                self._arrive(arrivals.pop(0))
            self._abort()
            if not self.scheduler.can_grow():
                self._read(0)
            work = self.scheduler.schedule(self.case.prefill_budget)
            self._check(work)
            launched = bool(work.chunks or work.running)
            self._execute(work)
            self._read(self.case.num_steps_ahead if launched else 0)
            self._check_progress()
            self.num_steps += 1
        pool = self.scheduler.pool
        assert pool.num_free == pool.num_blocks - 1 and not any(pool._num_owners)
        assert sorted(self.scheduler._free_rows) == list(range(self.case.max_num_seqs))
        assert all(request.finish_reason for request in self.requests)

    def _arrive(self, arrival: Arrival) -> None:
        params = SamplingParams(max_tokens=arrival.max_tokens)
        number = len(self.requests)
        request = Request(number, list(arrival.prompt), params, arrival.max_tokens, seed=0)
        self.aborted_at[number] = arrival.aborted_at
        self.scheduler.add(request)
        self.requests.append(request)

    def _abort(self) -> None:
        for request in self.requests:
            is_due = self.aborted_at[request.request_id] == self.num_steps
            if is_due and request.finish_reason is None:
                self.scheduler.finish(request, "abort")

    def _check(self, work: Schedule) -> None:
        scheduler, pool, size = self.scheduler, self.scheduler.pool, self.case.kv_block_size
        live = [*scheduler.running, *scheduler.prefilling]
        assert len({r.row for r in live}) == len(live) <= self.case.max_num_seqs
        owners = Counter(block for r in live for block in r.blocks)
        assert 0 not in owners and all(len(set(r.blocks)) == len(r.blocks) for r in live)
        assert [owners[b] for b in range(pool.num_blocks)] == pool._num_owners
        assert set(owners) | set(pool._free) == set(range(1, pool.num_blocks))
        assert not set(owners) & set(pool._free)
        for r in live:
            full = r.num_computed // size
            # What a step may write is its own and can be found by nobody.
            assert all(owners[b] == 1 and b not in pool._key_of for b in r.blocks[full:])
        for r in work.admitted:
            self.num_hits += r.num_computed > 0
            known = r.tokens(0, r.num_computed)
            for p in range(r.num_computed):
                assert self.held[self._slot(r, p)] == tuple(known[: p + 1])
        assert not (work.chunks and work.running)
        budget = scheduler.max_num_batched_tokens
        if scheduler.running and self.case.prefill_budget is not None:
            budget = max(1, min(budget, self.case.prefill_budget))
        assert sum(chunk.length for chunk in work.chunks) <= budget
        assert all(chunk.length >= 1 for chunk in work.chunks)
        assert [c.is_last for c in work.chunks].count(False) == 0 or len(work.chunks) == 1

    def _slot(self, request: Request, position: int) -> int:
        block, offset = divmod(position, self.case.kv_block_size)
        return request.blocks[block] * self.case.kv_block_size + offset

    def _write(self, request: Request, start: int, end: int, num_scratch: int) -> None:
        """K/V of the request's tokens start .. end, and scratch behind them."""
        tokens = request.prompt_token_ids + self.device[request.request_id]
        for p in range(start, end):
            self.held[self._slot(request, p)] = tuple(tokens[: p + 1])
        for p in range(end, end + num_scratch):
            self.held[self._slot(request, p)] = "scratch"

    def _execute(self, work: Schedule) -> None:
        """What the device does; a request that has ended there writes nothing more."""
        q, flight = self.case.num_query_per_req, []
        for request in work.admitted:
            self.device[request.request_id] = list(request.output_token_ids)
        for chunk in work.chunks:
            request, samples, is_last = chunk.request, chunk.samples, chunk.is_last
            self._write(request, chunk.start, chunk.start + chunk.length, q if is_last else 0)
            self.scheduler.prefilled(chunk)
            if samples:
                self.device[request.request_id].append(0)
                flight.append((request, [0]))
        for i, request in enumerate(work.running):
            outputs = self.device[request.request_id]
            left = request.max_tokens - len(outputs)
            if left == 0:
                flight.append((request, []))
                continue
            accepted = self.case.acceptance[(self.num_steps + i) % len(self.case.acceptance)]
            before = len(request.prompt_token_ids) + len(outputs) - 1
            new = [(before + k) % 2 for k in range(min(accepted, q, left))]
            self._write(request, before, before + 1, 2 * q - 1)
            outputs += new
            self._write(request, before, before + len(new), q)
            flight.append((request, new))
        self.flights.append(flight)

    def _read(self, num_left: int) -> None:
        while len(self.flights) > num_left:
            for request, tokens in self.flights.pop(0):
                if request.finish_reason is not None:
                    continue
                request.output_token_ids += tokens
                self.scheduler.advanced(request)
                if len(request.output_token_ids) == request.max_tokens:
                    self.scheduler.finish(request, "length")

    def _check_progress(self) -> None:
        """The oldest request gets a step at least every other time: it never waits for younger ones."""
        live = [r for r in self.requests if r.finish_reason is None]
        if not live:
            return
        oldest = live[0]
        progress = (oldest.request_id, oldest.num_computed, len(oldest.output_token_ids))
        if progress != self.progress:
            self.progress, self.progress_since = progress, self.num_steps
        assert self.num_steps - self.progress_since <= 2 + self.case.num_steps_ahead


@settings(max_examples=400, deadline=None)
@given(cases())
def test_no_block_is_lost_or_shared_wrongly_and_everyone_ends(case):
    Simulation(case).run()


def crowd(**changes) -> Case:
    arrivals = [Arrival(0, (1,) * 20 + (i,), 60) for i in range(6)]
    arguments = {
        "kv_block_size": 16,
        "num_query_per_req": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "prefill_budget": None,
        "spare_blocks": 2,
        "prefix_caching": True,
        "arrivals": arrivals,
        "acceptance": [1, 3, 2],
    }
    return Case(**(arguments | changes))


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_small_cache_preempts(prefix_caching, num_steps_ahead):
    simulation = Simulation(crowd(prefix_caching=prefix_caching, num_steps_ahead=num_steps_ahead))
    simulation.run()
    assert simulation.scheduler.num_preemptions > 3
    assert (simulation.num_hits > 3) == prefix_caching


def test_a_newcomer_does_not_take_the_blocks_of_the_next_iteration():
    scheduler = Scheduler(BlockPool(7, 4), 2, 64, num_query_per_req=2)  # 4 slots past s
    first = Request(0, [1] * 8, SamplingParams(max_tokens=9), 9, seed=0)
    scheduler.add(first)
    (chunk,) = scheduler.schedule().chunks
    scheduler.prefilled(chunk)
    first.output_token_ids += [1, 1]
    scheduler.advanced(first)
    assert (len(first.blocks), scheduler.pool.num_free) == (3, 3)  # 13 slots: one more is due
    scheduler.add(Request(1, [2] * 8, SamplingParams(max_tokens=9), 9, seed=0))
    work = scheduler.schedule()
    assert (work.running, work.admitted) == ([first], [])
    assert scheduler.num_preemptions == 0
    scheduler.finish(first, "stop")
    assert len(scheduler.schedule().admitted) == 1


def test_a_late_request_finds_the_common_prefix():
    arrivals = [Arrival(0, (1,) * 40, 4), Arrival(10, (1,) * 40 + (0,), 4)]
    simulation = Simulation(crowd(arrivals=arrivals, spare_blocks=9))
    simulation.run()
    assert simulation.num_hits == 1


def test_a_request_that_never_fits_is_refused():
    scheduler = Scheduler(BlockPool(4, 16), 2, 64, 4)
    with pytest.raises(ValueError, match="need 4 cache blocks of 16; there are 3"):
        scheduler.add(Request(0, [1] * 30, SamplingParams(), 16, seed=0))
    assert not scheduler.has_work


def test_the_prefill_budget_binds_only_while_requests_run():
    scheduler = Scheduler(BlockPool(64, 16), 2, 64, 4)
    for number in range(2):
        scheduler.add(Request(number, [1] * 40, SamplingParams(max_tokens=9), 9, seed=0))
    first = scheduler.schedule(prefill_budget=8)
    assert [chunk.length for chunk in first.chunks] == [40]  # nobody waits for a token
    scheduler.prefilled(first.chunks[0])
    first.chunks[0].request.output_token_ids.append(1)
    assert scheduler.schedule(prefill_budget=8).running
    assert [chunk.length for chunk in scheduler.schedule(prefill_budget=8).chunks] == [8]


def test_blocks_without_a_prefix_are_handed_out_first_and_old_prefixes_before_new_ones():
    pool = BlockPool(5, 2, enable_prefix_caching=True)
    old, new, plain = (pool.allocate(1) for _ in range(3))
    pool.publish(ROOT_PREFIX, [1, 2], old[0])
    pool.publish(ROOT_PREFIX, [3, 4], new[0])
    for blocks in (old, new, plain):
        pool.free(blocks)
    assert pool.allocate(2) in ([4, *plain], [*plain, 4])
    assert pool.match([3, 4, 5], 3).blocks == new and pool.match([1, 2, 5], 3).blocks == old
    assert pool.allocate(1) == old
    assert pool.match([1, 2, 5], 3).blocks == [] and pool.match([3, 4, 5], 3).blocks == new


def test_a_prefix_is_matched_token_by_token_behind_the_same_tokens():
    pool = BlockPool(9, 2, enable_prefix_caching=True)
    blocks = pool.allocate(3)
    prefix = pool.publish(ROOT_PREFIX, [1, 2], blocks[0])
    prefix = pool.publish(prefix, [3, 4], blocks[1])
    pool.publish(ROOT_PREFIX, [3, 4], blocks[2])
    assert pool.match([1, 2, 3, 4, 5], 5).blocks == blocks[:2]
    assert pool.match([1, 2, 3, 4], 3).blocks == blocks[:1]
    assert pool.match([3, 4, 3, 4], 4).blocks == blocks[2:]
    assert pool.match([2, 1], 2).blocks == []
