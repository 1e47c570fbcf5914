"""What Prometheus is told, in a registry of the app's own; names have their unit last."""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dormouse.history.consumers import ConsumerStatus

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters, gauges and histograms of one app."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
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
        self.planning = self._seconds("dormouse_query_planning_seconds", "Until the plan was made.")
        self.first_row = self._seconds("dormouse_query_first_row_seconds", "Until the first row was there.")
        self.whole = self._seconds("dormouse_query_seconds", "Until the last row was sent.")
        self.running = Gauge("dormouse_queries_running", "Queries that run now.", registry=registry)
        self.waiting = Gauge("dormouse_queries_waiting", "Queries that wait for others.", registry=registry)
        self.workers = Gauge("dormouse_sql_workers", "Processes that run SQL.", registry=registry)
        self.workers_ended = Counter(
            "dormouse_sql_workers_ended", "Processes for SQL that ended, by why.", ["why"], registry=registry
        )

        self._behind = {
            unit: Gauge(
                f"dormouse_consumer_{unit}_behind",
                f"{unit} that a consumer was behind when the table was counted last; +Inf: expired.",
                ["table", "consumer"],
                registry=registry,
            )
            for unit in ("rows", "seconds")
        }
        self._consumers: dict[str, set[str]] = {}

    def tell_consumers(self, table: str, consumers: Iterable[ConsumerStatus]) -> None:
        """How far a table's consumers are behind; it is not asked for here, so that no database is woken."""
        found = {one.name: one for one in consumers}
        for name in self._consumers.get(table, set()) - found.keys():
            for gauge in self._behind.values():
                gauge.remove(table, name)
        for name, one in found.items():
            for unit, behind in (("rows", one.rows_behind), ("seconds", one.seconds_behind)):
                self._behind[unit].labels(table, name).set(math.inf if behind is None else behind)
        self._consumers[table] = set(found)

    def _seconds(self, name: str, what: str) -> Histogram:
        text = f"{what} Since the query was admitted."
        return Histogram(name, text, ["kind"], buckets=_SECONDS, registry=self._registry)

    def text(self) -> bytes:
        """In the Prometheus text format."""
        return bytes(generate_latest(self._registry))
