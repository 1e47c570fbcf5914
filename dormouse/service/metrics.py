"""The metrics of the service for Prometheus, in a registry of the app's own.

A metric's name ends with its unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from dormouse.settings.process import environment
from dormouse.state.history.consumers import ConsumerStatus

CONTENT_TYPE = CONTENT_TYPE_LATEST
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the folder in which the processes of one service share their metrics.

Each process then reports the metrics of all of them.
"""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters, gauges and histograms of one app, or of all processes that serve it."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._is_shared = FOLDER_VARIABLE in environment()
        self._refreshed: list[Callable[[], object]] = []
        self.requests = Counter(
            "dormouse_http_requests",
            "Requests answered, by path of the API and status.",
            ["method", "path", "status"],
            registry=registry,
        )
        self.queries = Counter(
            "dormouse_queries", "Queries ended, by kind and outcome.", ["kind", "outcome"], registry=registry
        )
        self.rows = Counter("dormouse_query_rows", "Rows sent.", ["kind"], registry=registry)
        self.bytes = Counter("dormouse_query_bytes", "Bytes of answers sent.", ["kind"], registry=registry)
        self.mismatches = Counter(
            "dormouse_payload_mismatches",
            "Payloads that were read and differ from what was written.",
            registry=registry,
        )
        self.planning = self._seconds("dormouse_query_planning_seconds", "Seconds to the plan.")
        self.first_row = self._seconds("dormouse_query_first_row_seconds", "Seconds to the first row.")
        self.whole = self._seconds("dormouse_query_seconds", "Seconds to the last row.")
        self.running = self._now("dormouse_queries_running", "Queries that run now.")
        self.waiting = self._now("dormouse_queries_waiting", "Queries that wait for a slot.")
        self.workers = self._now("dormouse_sql_workers", "Processes that run SQL.")
        self.workers_ended = Counter(
            "dormouse_sql_workers_ended",
            "SQL processes that ended, by reason.",
            ["why"],
            registry=registry,
        )

        self._behind = {
            unit: Gauge(
                f"dormouse_consumer_{unit}_behind",
                f"{unit} by which a consumer was behind when the table was last counted; +Inf: expired.",
                ["table", "consumer"],
                registry=registry,
                multiprocess_mode="mostrecent",
            )
            for unit in ("rows", "seconds")
        }
        self._consumers: dict[str, set[str]] = {}

    def tell_consumers(self, table: str, consumers: Iterable[ConsumerStatus]) -> None:
        """Sets the gauges of the lag of a table's consumers, and drops those of removed consumers.

        The caller supplies the values, because a request for metrics must not wake a sleeping database.
        """
        by_name = {consumer.name: consumer for consumer in consumers}
        for name in self._consumers.get(table, set()) - by_name.keys():
            for gauge in self._behind.values():
                if self._is_shared:  # Prometheus cannot remove a label from metrics that processes share
                    gauge.labels(table, name).set(math.nan)
                else:
                    gauge.remove(table, name)
        for name, consumer in by_name.items():
            for unit, behind in (("rows", consumer.rows_behind), ("seconds", consumer.seconds_behind)):
                self._behind[unit].labels(table, name).set(math.inf if behind is None else behind)
        self._consumers[table] = set(by_name)

    def _seconds(self, name: str, what: str) -> Histogram:
        text = f"{what} Counted from the moment the query was admitted."
        return Histogram(name, text, ["kind"], buckets=_SECONDS, registry=self._registry)

    def _now(self, name: str, what: str) -> Gauge:
        """Returns a new gauge whose value is the sum over all live processes of the service."""
        return Gauge(name, what, registry=self._registry, multiprocess_mode="livesum")

    def follow(self, gauge: Gauge, value: Callable[[], int]) -> None:
        """Registers `value` as the source of a gauge.

        This process reads it whenever it reports metrics. Another process reports the value that this
        process had at its last request.
        """
        self._refreshed.append(lambda: gauge.set(value()))

    def refresh(self) -> None:
        """Updates the values that other processes report for this one. Each request ends with this call."""
        if self._is_shared:
            self._follow_all()

    def _follow_all(self) -> None:
        for follow in self._refreshed:
            follow()

    def text(self) -> bytes:
        """Returns the metrics in the Prometheus text format."""
        self._follow_all()
        if not self._is_shared:
            return bytes(generate_latest(self._registry))
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return bytes(generate_latest(together))


def forget_process(folder: str, process_id: int) -> None:
    """Removes the gauges of a process that has ended. Its counters stay."""
    mark_process_dead(process_id, folder)  # type: ignore[no-untyped-call]
