# SPDX-License-Identifier: Apache-2.0
"""Seeing an engine run: Prometheus metrics under vLLM's names, and a line in the log now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dflash.engine.core import Core, NewTokens
from dflash.engine.request import Request

logger = logging.getLogger("dflash")

LOG_SECONDS = 10.0
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)  # fmt: skip
FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """Counters of one engine in a registry of its own; names are vLLM's with the prefix dflash.

    Serve them with `prometheus_client.start_http_server(port, registry=llm.metrics.registry)`.
    """

    def __init__(self, model_name: str, num_speculative_tokens: int) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.num_requests_running = self._make(
            Gauge, "num_requests_running", "Requests in the batch."
        )
        self.num_requests_waiting = self._make(
            Gauge, "num_requests_waiting", "Requests not admitted."
        )
        self.kv_cache_usage = self._make(
            Gauge, "kv_cache_usage_perc", "Owned cache blocks; 1 = all."
        )
        self.prefix_cache_queries = self._make(
            Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_cache_hits = self._make(
            Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self.num_preemptions = self._make(Counter, "num_preemptions", "Requests computed again.")
        self.prompt_tokens = self._make(
            Counter, "prompt_tokens", "Prompt tokens of finished prefills."
        )
        self.generation_tokens = self._make(Counter, "generation_tokens", "Tokens committed.")
        self.time_to_first_token = self._make(
            Histogram, "time_to_first_token_seconds", "From arrival.", buckets=LATENCY_BUCKETS
        )
        self.inter_token_latency = self._make(
            Histogram,
            "inter_token_latency_seconds",
            "Between two steps that gave a request tokens.",
            buckets=LATENCY_BUCKETS,
        )
        self.e2e_request_latency = self._make(
            Histogram, "e2e_request_latency_seconds", "From arrival.", buckets=LATENCY_BUCKETS
        )
        self.num_drafts = self._make(Counter, "spec_decode_num_drafts", "Blocks verified.")
        self.num_draft_tokens = self._make(
            Counter, "spec_decode_num_draft_tokens", "Draft tokens verified."
        )
        self.num_accepted_tokens = self._make(
            Counter, "spec_decode_num_accepted_tokens", "Draft tokens accepted."
        )
        success = Counter(
            "dflash:request_success",
            "Finished requests.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self.request_success = {r: success.labels(model_name, r) for r in FINISH_REASONS}
        per_pos = Counter(
            "dflash:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the block.",
            ("model_name", "position"),
            registry=self.registry,
        )
        self.num_accepted_tokens_per_pos = [
            per_pos.labels(model_name, str(i)) for i in range(num_speculative_tokens)
        ]

    def _make(self, kind, name: str, text: str, **arguments):
        metric = kind(f"dflash:{name}", text, ("model_name",), registry=self.registry, **arguments)
        return metric.labels(self._model_name)


class Monitor:
    """Turns steps into metrics and log lines.

    Args:
        core: whose steps are watched.
        metrics: what they are counted in.
        clock: seconds.
    """

    def __init__(self, core: Core, metrics: Metrics, clock=time.perf_counter) -> None:
        self._core = core
        self.metrics = metrics
        self._clock = clock
        self._num_preemptions = 0
        self._window = _Window(clock())
        # Read when they are asked for: a request may also end between two steps.
        scheduler = core.scheduler
        metrics.num_requests_running.set_function(
            lambda: len(scheduler.running) + len(scheduler.prefilling)
        )
        metrics.num_requests_waiting.set_function(lambda: len(scheduler.waiting))
        metrics.kv_cache_usage.set_function(lambda: scheduler.pool.usage)

    def stepped(self, new: Sequence[NewTokens]) -> None:
        """Counts what one step committed."""
        now, m, scheduler = self._clock(), self.metrics, self._core.scheduler
        m.num_preemptions.inc(scheduler.num_preemptions - self._num_preemptions)
        self._num_preemptions = scheduler.num_preemptions
        for tokens in new:
            self._committed(tokens, now)
        if now - self._window.since >= LOG_SECONDS:
            self._log(now)

    def finished(self, request: Request, reason: str) -> None:
        """Counts the end of a request, whoever ended it."""
        self.metrics.request_success[reason].inc()
        self.metrics.e2e_request_latency.observe(self._clock() - request.arrived_at)

    def _committed(self, new: NewTokens, now: float) -> None:
        m, request, count = self.metrics, new.request, len(new.token_ids)
        if count == 0:
            return
        m.generation_tokens.inc(count)
        self._window.generated += count
        if request.last_token_at is None:
            self._first_token(request, now)
        else:
            m.inter_token_latency.observe(now - request.last_token_at)
        request.last_token_at = now
        if new.num_draft_tokens == 0:
            return
        m.num_drafts.inc()
        m.num_draft_tokens.inc(new.num_draft_tokens)
        m.num_accepted_tokens.inc(count - 1)
        for position in m.num_accepted_tokens_per_pos[: count - 1]:
            position.inc()
        self._window.drafts += 1
        self._window.accepted += count - 1

    def _first_token(self, request: Request, now: float) -> None:
        m, statistics = self.metrics, request.statistics
        statistics.first_token_seconds = now - request.arrived_at
        m.time_to_first_token.observe(statistics.first_token_seconds)
        m.prompt_tokens.inc(statistics.num_prompt_tokens)
        m.prefix_cache_queries.inc(statistics.num_prompt_tokens)
        m.prefix_cache_hits.inc(statistics.num_cached_tokens)
        self._window.prompted += statistics.num_prompt_tokens
        self._window.cached += statistics.num_cached_tokens

    def _log(self, now: float) -> None:
        w, scheduler = self._window, self._core.scheduler
        seconds = now - w.since
        logger.info(
            "prompt %.1f tok/s, generation %.1f tok/s, AL %.2f, running %d, waiting %d, K/V in use %.1f %%, "
            "prefix hits %.1f %%",
            w.prompted / seconds,
            w.generated / seconds,
            1 + w.accepted / max(w.drafts, 1),
            len(scheduler.running) + len(scheduler.prefilling),
            len(scheduler.waiting),
            100 * scheduler.pool.usage,
            100 * w.cached / max(w.prompted, 1),
        )
        self._window = _Window(now)


class _Window:
    """What happened since the last line in the log."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.prompted = self.cached = self.generated = self.drafts = self.accepted = 0
