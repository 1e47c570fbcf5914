"""Updates whose rows are planned in the round trip of their attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import dormouse as dm
from dormouse.postgres.queries import execute_each
from tests.support.api import Instance, Table
from tests.support.model import sql

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
PLANNING = "dormouse.state.files.attempts.execute_each"


def filled(instance: Instance, keep: str, **properties: Any) -> Table:
    table = instance.create_table(
        "t", SCHEMA, properties=dm.TableProperties(keep=keep, **properties), layout="file_table"
    )
    table.ingest([{"k": k, "v": k} for k in range(100)])
    table.update({"k": 1}, {"v": sql("v + 100")})
    return table


def seen(table: Table) -> dict[int, int]:
    return {row["k"]: row["v"] for row in table.query(columns=["k", "v"]).read_all().to_pylist()}


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
@pytest.mark.parametrize("where", [{"k": 7}, {"k": [7, 8]}, {"k": dm.Range(7, 9)}])
def test_the_rows_of_an_update_by_key_need_no_round_trip_of_their_own(
    instance: Instance, keep: str, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled(instance, keep)
    with monkeypatch.context() as patched:
        patched.setattr("dormouse.reading.table_view._View.now", None)
        table.update(where, {"v": sql("v * 10")})
    assert (seen(table)[7], seen(table)[9]) == (70, 9)


def test_an_update_at_the_current_time_reads_after_it_is_planned(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled(instance, "every_row")
    monkeypatch.setattr(PLANNING, None)
    table.update({"k": 7}, {"v": sql("v + year(now())")})
    assert seen(table)[7] > 2_000


MEANWHILE: dict[str, Callable[[Instance], object]] = {
    "another update": lambda i: i.table("t").update({"k": 7}, {"v": sql("v + 5")}),
    "a column": lambda i: i.table("t").add_column(dm.Field("w", dm.INT, nullable=True)),
    "a split": lambda i: i.table("t").split(),
    "a layout": lambda i: i.table("t").convert_layout("salted_counts"),
    "a property": lambda i: i.table("t").set_properties(verify_reads=True),
    "a name": lambda i: i.rename_table("t", "u") and i.rename_table("u", "t"),
    "a compaction": lambda i: i.table("t").compact(),
}


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
@pytest.mark.parametrize("what", MEANWHILE)
def test_an_update_goes_on_from_what_is_there_when_it_is_planned(
    instance: Instance, keep: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled(instance, keep, split_threshold_rows=10, split_min_rows=2)
    left = [MEANWHILE[what]]

    def after(*given: Any, **how: Any) -> Any:
        if left:
            left.pop()(instance)
        return execute_each(*given, **how)

    monkeypatch.setattr(PLANNING, after)
    table.update({"k": 7}, {"v": sql("v + 1")})
    assert not left
    assert seen(instance.table("t")) == {k: k + 100 * (k == 1) for k in range(100)} | {
        7: 13 if what == "another update" else 8
    }
