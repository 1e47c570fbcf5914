"""What Prometheus is told, in a registry of the app's own; names have their unit last."""

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
"""Names a folder in which processes of one service have their metrics, so that each tells those of all."""
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
            "Payloads that were asked for and were not what was written.",
            registry=registry,
        )
        self.planning = self._seconds("dormouse_query_planning_seconds", "Until the plan was made.")
        self.first_row = self._seconds("dormouse_query_first_row_seconds", "Until the first row was there.")
        self.whole = self._seconds("dormouse_query_seconds", "Until the last row was sent.")
        self.running = self._now("dormouse_queries_running", "Queries that run now.")
        self.waiting = self._now("dormouse_queries_waiting", "Queries that wait for others.")
        self.workers = self._now("dormouse_sql_workers", "Processes that run SQL.")
        self.workers_ended = Counter(
            "dormouse_sql_workers_ended", "Processes for SQL that ended, by why.", ["why"], registry=registry
        )

        self._behind = {
            unit: Gauge(
                f"dormouse_consumer_{unit}_behind",
                f"{unit} that a consumer was behind when the table was counted last; +Inf: expired.",
                ["table", "consumer"],
                registry=registry,
                multiprocess_mode="mostrecent",
            )
            for unit in ("rows", "seconds")
        }
        self._consumers: dict[str, set[str]] = {}

    def tell_consumers(self, table: str, consumers: Iterable[ConsumerStatus]) -> None:
        """How far a table's consumers are behind; it is not asked for here, so that no database is woken."""
        found = {one.name: one for one in consumers}
        for name in self._consumers.get(table, set()) - found.keys():
            for gauge in self._behind.values():
                if self._is_shared:  # no label can be taken away
                    gauge.labels(table, name).set(math.nan)
                else:
                    gauge.remove(table, name)
        for name, one in found.items():
            for unit, behind in (("rows", one.rows_behind), ("seconds", one.seconds_behind)):
                self._behind[unit].labels(table, name).set(math.inf if behind is None else behind)
        self._consumers[table] = set(found)

    def _seconds(self, name: str, what: str) -> Histogram:
        text = f"{what} Since the query was admitted."
        return Histogram(name, text, ["kind"], buckets=_SECONDS, registry=self._registry)

    def _now(self, name: str, what: str) -> Gauge:
        """Of what is there now, in all processes that are."""
        return Gauge(name, what, registry=self._registry, multiprocess_mode="livesum")

    def follow(self, gauge: Gauge, value: Callable[[], int]) -> None:
        """The gauge has the value whenever metrics are told, or with the last request of another process."""
        self._refreshed.append(lambda: gauge.set(value()))

    def refresh(self) -> None:
        """After a request: what another process will tell of this one."""
        if self._is_shared:
            self._follow_all()

    def _follow_all(self) -> None:
        for follow in self._refreshed:
            follow()

    def text(self) -> bytes:
        """In the Prometheus text format."""
        self._follow_all()
        if not self._is_shared:
            return bytes(generate_latest(self._registry))
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return bytes(generate_latest(together))


def forget_process(folder: str, process_id: int) -> None:
    """What was there in a process that has ended is there no more; what it counted stays."""
    mark_process_dead(process_id, folder)  # type: ignore[no-untyped-call]
