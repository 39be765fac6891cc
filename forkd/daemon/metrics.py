"""Figures for Prometheus: gauges read when asked, histograms fed by events."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from forkd import __version__
from forkd.runtime import Runtime

QUICK = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One registry for one app. Call ``text`` for the exposition."""

    def __init__(self, runtime: Runtime) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(runtime))

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(name, about, registry=self._registry, buckets=QUICK)

        spawn = histogram("forkd_spawn_seconds", "From request to a child that serves")
        exec_ = histogram("forkd_exec_seconds", "Commands run to their end")
        eval_ = histogram("forkd_eval_seconds", "Evaluations in the warm interpreter")
        pause = histogram("forkd_branch_pause_seconds", "How long a branched source stood still")
        self.requests = Histogram(
            "forkd_http_request_seconds",
            "HTTP requests by method and status",
            ["method", "status"],
            registry=self._registry,
            buckets=QUICK,
        )
        self.errors = Counter("forkd_errors", "Refusals and failures by code", ["code"], registry=self._registry)
        self._feeds: dict[str, Callable[[dict[str, Any]], None]] = {
            "spawn": lambda event: spawn.observe(event["spawn_ms"] / 1000),
            "exec": lambda event: exec_.observe(event["seconds"]),
            "eval": lambda event: eval_.observe(event["seconds"]),
            "branch": lambda event: pause.observe(event["pause_ms"] / 1000),
        }
        runtime.events.listen(self._on_event)

    def text(self) -> bytes:
        """Everything in the text format."""
        return generate_latest(self._registry)

    def _on_event(self, event: dict[str, Any]) -> None:
        if feed := self._feeds.get(event["event"]):
            feed(event)


class _Now(Collector):
    """Gauges that are a question, not a memory."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Ask."""
        runtime = self._runtime
        root = runtime.snapshots.root
        snapshots = sum(not name.startswith(".") for name in os.listdir(root)) if root.is_dir() else 0
        yield GaugeMetricFamily("forkd_snapshots_total", "Snapshots in the store", snapshots)
        yield GaugeMetricFamily("forkd_sandboxes_active", "Running sandboxes", len(runtime.sandboxes))
        yield GaugeMetricFamily("forkd_branches_in_flight", "Branches being captured", len(runtime.writing))
        cap = runtime.settings.branch_concurrency
        yield GaugeMetricFamily("forkd_branch_concurrency_cap", "Branches at once, 0 for any number", cap)
        yield GaugeMetricFamily("forkd_templates", "Templates children are cloned from", len(runtime.templates.kept))
        yield from self._pools()
        spawned = CounterMetricFamily("forkd_spawned", "Children and templates by how they came to be", labels=["how"])
        for how, count in asdict(runtime.templates.counts).items():
            spawned.add_metric([how], count)
        yield spawned
        info = GaugeMetricFamily("forkd_build_info", "This forkd", labels=["version"])
        info.add_metric([__version__], 1)
        yield info

    def _pools(self) -> Iterator[GaugeMetricFamily]:
        size = GaugeMetricFamily("forkd_pool_size", "Machines that shall wait, by snapshot", labels=["tag"])
        waiting = GaugeMetricFamily("forkd_pool_waiting", "Machines that wait, by snapshot", labels=["tag"])
        for tag, pool in self._runtime.pools.pools.items():
            size.add_metric([tag], pool.size)
            waiting.add_metric([tag], len(pool.waiting))
        yield size
        yield waiting
