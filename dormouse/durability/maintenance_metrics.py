"""What maintenance leaves behind and what fails, as a file for the textfile collector of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dormouse.durability.instance_rounds import InstanceRound
from dormouse.durability.maintaining import Maintenance
from dormouse.errors import not_installed
from dormouse.payloads.status import STATES

if TYPE_CHECKING:
    from dormouse.payloads import PayloadStore

_OF_A_TABLE = {
    "files": "Files that are referred to.",
    "references": "References of files in partitions.",
    "unreferenced_files": "Files that wait for collection.",
    "compaction_jobs": "Compaction jobs that are not done.",
    "jobs_given_up": "Compaction jobs that were given up.",
}
_OF_PAYLOADS = {
    "backlog_days": "Days of payloads that are over and not offloaded.",
    "backlog_rows": "About how many payloads wait to be offloaded.",
    "backlog_bytes": "Bytes in PostgreSQL that wait to be offloaded.",
    "failing_days": "Days of payloads whose last work failed.",
    "postgres_bytes": "Bytes of payloads in PostgreSQL.",
    "object_bytes": "Bytes of objects of payloads.",
    "orphaned_bytes": "Bytes of objects of payloads that wait for their deletion.",
    "mismatches": "Payloads that this process read and that were not what was written.",
}


class Number(NamedTuple):
    """A number of an instance: its name without the prefix, what it is, its value, its labels."""

    name: str
    what: str
    value: float
    labels: Mapping[str, str] = MappingProxyType({})


def payload_numbers(payloads: PayloadStore) -> Iterator[Number]:
    """Yields the numbers of the payloads of an instance."""
    now = payloads.status()
    for name, what in _OF_PAYLOADS.items():
        yield Number(f"payload_{name}", what, getattr(now, name))
    days = (now.open_days, now.offloaded_days, now.folding_days, now.folded_days)
    for state, count in zip(STATES, days, strict=True):
        yield Number("payload_days", "Days of payloads, by state.", count, {"state": state})


def write_metrics(
    path: Path,
    tables: Iterable[Any],
    rounds: Iterable[InstanceRound],
    done: Maintenance,
    others: Iterable[Number] = (),
) -> None:
    """Replaces the file as a whole; `tables` are their status. Raises `DependencyMissing`, `OSError`."""
    try:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
    except ImportError:
        raise not_installed("prometheus-client", "service") from None
    registry = CollectorRegistry()

    def gauge(name: str, what: str, *labels: str) -> Any:
        return Gauge(f"dormouse_{name}", what, labels, registry=registry)

    gauge("maintenance_cycles", "Cycles since the process began.").set(done.cycles)
    gauge("maintenance_failures", "What failed since the process began.").set(done.failed)
    numbers = {name: gauge(f"table_{name}", what, "table") for name, what in _OF_A_TABLE.items()}
    failing = gauge("round_failing", "Whether the last round failed.", "table", "kind")
    well = gauge("round_well_timestamp_seconds", "When one of the instance went well last.", "kind")
    behind = {
        unit: gauge(
            f"consumer_{unit}_behind", f"How far a consumer is behind, in {unit}.", "table", "consumer"
        )
        for unit in ("rows", "seconds")
    }
    expired = gauge("consumer_expired", "Whether a consumer's files are kept no more.", "table", "consumer")
    for table in tables:
        for one in table.consumers:
            expired.labels(table.name, one.name).set(one.is_expired)
            for unit, lag in behind.items():
                if not one.is_expired:
                    lag.labels(table.name, one.name).set(getattr(one, f"{unit}_behind"))
        for name, one in numbers.items():
            one.labels(table.name).set(getattr(table, name))
        for last in table.rounds:
            failing.labels(table.name, last.kind).set(last.error is not None)
    for each in rounds:
        failing.labels("", each.kind).set(each.error is not None)
        if each.well_at is not None:
            well.labels(each.kind).set(each.well_at.timestamp())
    gauges: dict[str, Any] = {}
    for name, what, value, labels in others:
        if name not in gauges:
            gauges[name] = gauge(name, what, *labels)
        (gauges[name].labels(*labels.values()) if labels else gauges[name]).set(value)
    write_to_textfile(str(path), registry)
