"""Metrics of saves for Prometheus, through its own Python client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from holdfast import events
from holdfast.drain import trainer
from holdfast.errors import Error

# Seconds: from the call of a small state to a large one on slow storage.
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
# Phases and the report's keys.
PHASES = {
    "blocked": "time_blocked",
    "staged": "time_to_staged",
    "waiting_memory": "time_waiting_memory",
    "writing": "time_writing",
    "syncing": "time_syncing",
    "durable": "time_to_durable",
}


class _AtScrape:
    """Gauges that are read when they are asked for."""

    def __init__(self) -> None:
        self.step = -1
        self.time = 0.0

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        from holdfast import _runtime

        staging = _runtime.total_staging()
        for name, text, value in (
            ("staging_held_bytes", "Staging memory that saves hold", "bytes_held"),
            ("staging_held_peak_bytes", "The most that saves have held", "bytes_held_peak"),
            ("staging_cap_bytes", "Size of the staging memory", "arena_bytes"),
            ("staging_quarantined_bytes", "Held until a worker is gone", "bytes_quarantined"),
        ):
            yield GaugeMetricFamily("holdfast_" + name, text, value=staging.get(value, 0))
        yield GaugeMetricFamily(
            "holdfast_saves_in_flight", "Saves under way", value=events.in_flight()
        )
        reports = [{**draining.report, "failed": len(draining.report["failed"])} for draining in trainer.drains]
        for name, text, key in (
            ("drain_pending_checkpoints", "Checkpoints that have not arrived in the second place", "pending"),
            ("drain_arrived_checkpoints", "Checkpoints that this process's drains have brought there", "arrived"),
            ("drain_sent_bytes", "Bytes that they have sent", "bytes_sent"),
            ("drain_failed_checkpoints", "Checkpoints that they have given up", "failed"),
            ("drain_troubles", "Errors that they have tried again", "troubles"),
        ):
            if reports:
                yield GaugeMetricFamily("holdfast_" + name, text, value=sum(r[key] for r in reports))
        if self.time:
            yield GaugeMetricFamily(
                "holdfast_last_durable_step", "Step of the last durable save", value=self.step
            )
            yield GaugeMetricFamily(
                "holdfast_last_durable_timestamp_seconds",
                "Unix time at which the last save became durable",
                value=self.time,
            )


def prometheus(registry: Any = None) -> events.Handle:
    """Adds the metrics of this process's saves to a registry; docs/python.md lists them.

    Args:
        registry: a ``prometheus_client.CollectorRegistry``; default the client's own.

    Raises:
        Error: UNIMPLEMENTED without prometheus_client, ALREADY_EXISTS if the registry has them.
    """
    try:
        import prometheus_client as client
    except ImportError as error:
        raise Error(
            "UNIMPLEMENTED",
            "observe.prometheus: prometheus_client is not installed; pip install prometheus-client",
        ) from error
    registry = client.REGISTRY if registry is None else registry
    made: list[Any] = []

    def add(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
        made.append(kind(f"holdfast_{name}", text, labels, registry=registry, **options))
        return made[-1]

    def remove() -> None:
        for metric in made:
            registry.unregister(metric)

    try:
        saves = add(client.Counter, "saves_total", "Saves that have ended", ("outcome", "kind"))
        written = add(client.Counter, "bytes_total", "Bytes of durable saves", ("kind",))
        seconds = add(
            client.Histogram, "save_seconds", "Seconds by phase", ("phase",), buckets=BUCKETS
        )
        stale = add(
            client.Counter, "stale_saves_total", "Saves that are identical to the previous one"
        )
        at_scrape = _AtScrape()
        registry.register(at_scrape)
    except ValueError as error:
        remove()
        raise Error("ALREADY_EXISTS", f"observe.prometheus: {error}") from error
    made.append(at_scrape)
    lock = threading.Lock()

    def observe(subject: Any, report: dict[str, Any] | None, error: Error | None) -> None:
        kind = subject.extra.get("kind", "state")
        saves.labels(events.outcome(subject, error), kind).inc()
        if report is None:
            return
        written.labels(kind).inc(report.get("bytes", 0))
        for phase, key in PHASES.items():
            if key in report:
                seconds.labels(phase).observe(report[key])
        if report.get("stale"):
            stale.inc()
        with lock:
            at_scrape.step, at_scrape.time = subject.step, time.time()

    return events.Handle(observe, remove)
