# SPDX-License-Identifier: Apache-2.0
"""Random traffic for a long time: no error, no leak, the same greedy answers and a steady AL throughout.

    python -m tests.soak --minutes 30 [--device auto] [--dtype auto] [--rate R] [--json PATH]

The run has four quarters. Each ends when everything is answered: then nothing may be left in the engine, and
memory is read. RSS and the GPU's memory may grow by 3 % + 16 MiB from the first such reading to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import torch

from dflash import LLM, Statistics
from dflash.bench.facts import write_results
from dflash.bench.humaneval import questions
from tests.support import leaks
from tests.support.answers import Answer, faults
from tests.support.quarters import Quarter, line, table
from tests.support.traffic import Ask, Traffic

NUM_QUARTERS = 4
LINE_SECONDS = 10.0
STUCK_SECONDS = 300.0
MAX_FAILURES = 5
AL_SPREAD = 0.01
ALLOWED_GROWTH, ALLOWED_GROWTH_MIB = 0.03, 16.0


class Soak:
    """One run over an LLM; `failures` says what went wrong.

    Args:
        llm: all its traffic is this run's.
        texts: questions to ask.
        minutes: of arrivals; answers in progress at the end of a quarter come on top.
        rate: requests a second, while fewer than 4 x max_num_seqs are outstanding.
        seed: of the traffic.
        exact: greedy answers must equal the first ones (float32).
    """

    def __init__(
        self, llm: LLM, texts: Sequence[str], minutes: float, rate: float, seed: int, exact: bool
    ) -> None:
        self._llm, self._exact, self._rate = llm, exact, rate
        self._seconds = minutes * 60 / NUM_QUARTERS
        self._max_outstanding = 4 * llm.args.max_num_seqs
        self._traffic = Traffic(llm, texts, seed)
        self._rng = random.Random(seed + 1)
        self._tasks: set[asyncio.Task] = set()
        self._live_before = leaks.live_requests()
        self.failures: list[str] = []
        self.quarters: list[Quarter] = []

    def run(self) -> None:
        self._answer_references()
        asyncio.run(self._run())
        self._check_run()

    @property
    def num_iterations(self) -> int:
        return sum(quarter.iterations for quarter in self.quarters)

    def _answer_references(self) -> None:
        """Alone: what they must be among others."""
        asks, total = self._traffic.references, Statistics()
        outputs = [self._llm.generate([a.prompt], a.params)[0] for a in asks]
        for output in outputs:
            total.add(output.statistics)
        self._expected = [output.outputs[0].token_ids for output in outputs]
        self._drafts_alone = [output.statistics.num_drafts for output in outputs]
        self._acceptance_length = total.acceptance_length

    async def _run(self) -> None:
        self._started = asyncio.get_running_loop().time()
        printing = asyncio.create_task(self._print_lines())
        while len(self.quarters) < NUM_QUARTERS and not self.failures:
            await self._run_quarter()
        printing.cancel()

    async def _run_quarter(self) -> None:
        now = asyncio.get_running_loop().time
        quarter = Quarter(reference_acceptance_length_alone=self._acceptance_length)
        preemptions = self._llm.core.scheduler.num_preemptions
        iterations = self._llm.core.num_iterations
        self.quarters.append(quarter)
        begun = due = now()
        while (due := due + self._rng.expovariate(self._rate)) < begun + self._seconds:
            await asyncio.sleep(due - now())
            while len(self._tasks) >= self._max_outstanding:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.failures:
                break
            due = max(due, now())
            task = asyncio.create_task(self._ask(self._traffic.next(), quarter))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await self._drain()
        quarter.seconds = now() - begun
        quarter.preemptions = self._llm.core.scheduler.num_preemptions - preemptions
        quarter.iterations = self._llm.core.num_iterations - iterations
        self._close(quarter)

    async def _drain(self) -> None:
        if not self._tasks:
            return
        _, stuck = await asyncio.wait(self._tasks, timeout=STUCK_SECONDS)
        if stuck:
            self._fail(f"{len(stuck)} requests did not end in {STUCK_SECONDS:g} s")

    async def _ask(self, ask: Ask, quarter: Quarter) -> None:
        quarter.requests += 1
        answer = Answer()
        try:
            await asyncio.wait_for(self._read(ask, answer, quarter), ask.cancel_after)
        except asyncio.TimeoutError:
            quarter.left += 1
        except Exception as error:
            if ask.refused and isinstance(error, ValueError):
                quarter.refused += 1
            else:
                self._fail(f"{type(error).__name__}: {error}", ask)

    async def _read(self, ask: Ask, answer: Answer, quarter: Quarter) -> None:
        async with aclosing(self._llm.stream_async(ask.prompt, ask.params)) as stream:
            for num_chunks in itertools.count():
                if num_chunks == ask.close_after:
                    quarter.left += 1
                    return
                chunk = await anext(stream, None)
                if chunk is None:
                    break
                answer.add(chunk)
                quarter.tokens += len(chunk.token_ids)
        core = self._llm.core
        found = list(
            faults(answer, ask.params, core.limits.max_model_len, core.limits.eos_token_ids)
        )
        if ask.refused:
            found = ["answered, should have been refused"]
        for fault in found:
            self._fail(fault, ask)
        if not found:
            self._count(ask, answer, quarter)

    def _count(self, ask: Ask, answer: Answer, quarter: Quarter) -> None:
        assert answer.finished is not None
        statistics = answer.finished.statistics
        quarter.finished += 1
        quarter.drafts += statistics.num_drafts
        quarter.accepted += statistics.num_accepted_tokens
        quarter.prompt_tokens += statistics.num_prompt_tokens
        quarter.cached_tokens += statistics.num_cached_tokens
        if ask.reference is None:
            return
        expected, tokens = self._expected[ask.reference], answer.tokens[0]
        quarter.references += 1
        quarter.references_equal += tokens == expected
        quarter.reference_drafts += statistics.num_drafts
        quarter.reference_drafts_alone += self._drafts_alone[ask.reference]
        if self._exact and tokens != expected:
            self._fail(f"reference {ask.reference}: {tokens}, alone {expected}")

    def _fail(self, message: str, ask: Ask | None = None) -> None:
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(message if ask is None else f"{message}\n    {str(ask)[:800]}")
            print(f"FAILED: {self.failures[-1]}", flush=True)

    def _close(self, quarter: Quarter) -> None:
        """Nothing runs: nothing may be left."""
        quarter.memory = leaks.memory_mib(self._llm.facts.device)
        for fault in leaks.left_over(self._llm):
            self._fail(fault)
        live = leaks.live_requests() - self._live_before
        if live:
            self._fail(f"{live} Request and Job objects are alive, and nothing runs")

    def _check_run(self) -> None:
        if self.failures:
            return
        for name in ("left", "refused", "cached_tokens", "preemptions"):
            if not sum(getattr(quarter, name) for quarter in self.quarters):
                self._fail(f"{name}: none in the whole run, nothing is shown")
        lengths = [quarter.reference_acceptance_length for quarter in self.quarters]
        if not all(quarter.references for quarter in self.quarters):
            self._fail("a quarter without a reference prompt: the run is too short")
            return
        if max(lengths) > min(lengths) * (1 + AL_SPREAD):
            self._fail(f"AL of the references is not steady: {lengths}")
        before, after = self.quarters[0].memory, self.quarters[-1].memory
        for name, value in before.items():
            if after[name] > value * (1 + ALLOWED_GROWTH) + ALLOWED_GROWTH_MIB:
                self._fail(f"{name} grew from {value:.0f} to {after[name]:.0f} MiB")

    async def _print_lines(self) -> None:
        now, tokens = asyncio.get_running_loop().time, 0
        while True:
            await asyncio.sleep(LINE_SECONDS)
            total = Quarter.sum_of(self.quarters)
            rate, tokens = (total.tokens - tokens) / LINE_SECONDS, total.tokens
            state = line(total, self._llm.core.scheduler, rate, leaks.rss_mib())
            print(f"{now() - self._started:5.0f} s: {state}", flush=True)


def num_blocks(max_num_seqs: int) -> int:
    """Few enough that requests of up to 700 tokens push each other out; any of them fits alone."""
    return 1 + max(48, 8 * max_num_seqs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="requests a second; 1.5, on a GPU 30")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    # Not what a measurement finds best: a run is to be the same twice.
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--min-iterations", type=int, default=0, help="a run with fewer fails")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    llm = LLM(
        args.model,
        args.draft,
        device=args.device,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=args.max_num_seqs,
        num_speculative_tokens=args.num_speculative_tokens,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=num_blocks(args.max_num_seqs),
        seed=args.seed,
    )
    device, dtype = llm.facts.device, llm.facts.dtype
    rate = args.rate or (30.0 if device.type == "cuda" else 1.5)
    pair = f"{args.model} + {args.draft} (N = {args.num_speculative_tokens})"
    print(f"{pair}, {dtype}, {device}, {rate:g} requests/s, seed {args.seed}", flush=True)
    soak = Soak(llm, questions(), args.minutes, rate, args.seed, exact=dtype == torch.float32)
    soak.run()
    for row in table(soak.quarters):
        print(row)
    if soak.num_iterations < args.min_iterations:
        soak.failures.append(
            f"fewer than {args.min_iterations} iterations: raise --rate or --minutes"
        )
    state = f"FAILED: {soak.failures}" if soak.failures else "passed"
    print(f"soak: {state}, {soak.num_iterations} iterations")
    if args.json:
        figures = {"failures": soak.failures, "quarters": [q.figures() for q in soak.quarters]}
        write_results(args.json, figures, str(device))
    return bool(soak.failures)


if __name__ == "__main__":
    sys.exit(main())
