"""Edits and transactions that are killed at each exchange with the database: they are done, or nothing is.

The same id again completes each of them once.
"""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from itertools import cycle
from pathlib import Path

import pyarrow as pa
import pytest
from keyed_tables import SCHEMA
from runners import the_dead_are_known

import dormouse as dm
from tests.cutting import CuttingProxy, until
from tests.killed_edits import BY_VALUES, EDITS, EVERY, KEYED, KEYS, Editors
from tests.support.api import Instance
from tests.support.state import LAYOUTS

OTHERS = (7, 8)
PROPERTIES = {"compaction_strategy": "basic", "compaction_batch_files": 2, "gc_delay_seconds": 0}


@pytest.fixture
def editors(instance: Instance, dsn: str, tmp_path: Path) -> Editors:
    return Editors(dsn, (tmp_path / "objects").as_uri())


def fill(instance: Instance, layout: str) -> None:
    rows = pa.table({"k": [*KEYS, *OTHERS], "v": [0] * 5, "s": ["first"] * 5})
    for name, keep in {KEYED: "newest_row", EVERY: "every_row"}.items():
        properties = dm.TableProperties(keep=keep, attempt_expiry_seconds=0.0, **PROPERTIES)  # type: ignore[arg-type]
        instance.create_table(name, SCHEMA, layout=layout, split_points=[3], properties=properties).ingest(
            rows
        )


def values(instance: Instance) -> dict[str, dict[int, int]]:
    """Returns the values of both tables, of one moment, by table and key."""
    text = f"select '{KEYED}' as t, k, v from {KEYED} union all select '{EVERY}', k, v from {EVERY}"
    rows = instance.sql(text).read_all().to_pylist()
    found: dict[str, dict[int, int]] = {KEYED: {}, EVERY: {}}
    for row in rows:
        found[row["t"]][row["k"]] = row["v"]
    assert sum(map(len, found.values())) == len(rows), "a row is there twice"
    return found


def expected(what: str, times: int) -> dict[str, dict[int, int]]:
    """Returns the values after an edit was applied a number of times."""
    found = {name: dict.fromkeys((*KEYS, *OTHERS), 0) for name in (KEYED, EVERY)}
    for name in EDITS[what][1]:
        found[name] |= dict.fromkeys(KEYS, times)
    if what == "a transaction":
        found[EVERY] |= {1_000 + number: number for number in range(times)}
    return found


def check_killed(instance: Instance, editors: Editors, what: str, first: int, step: int) -> int:
    """Kills an edit before each exchange, counted from `first`; returns how many were killed."""
    times, killed = 0, 0
    while editors.is_killed(what, f"{what} {times}", times, first + killed * step):
        killed += 1
        found = values(instance)
        assert found in (expected(what, times), expected(what, times + 1)), "half done"
        for _ in range(2):
            EDITS[what][0](instance, f"{what} {times}", times)
            assert values(instance) == expected(what, times + 1), "not once"
        times += 1
        if killed % 5 == 0:
            for name in (KEYED, EVERY):
                assert not instance.table(name).compact(engine="local").errors
    assert values(instance) == expected(what, times + 1)
    for name in (KEYED, EVERY):
        the_dead_are_known(instance.table(name).context)
        instance.table(name).compact(engine="local", full=True)
        instance.table(name).collect_garbage()
    assert values(instance) == expected(what, times + 1)
    assert instance.check(deep=True).problems == ()
    assert [*instance.orphans(timedelta(0))] == []
    return killed


def test_a_deletion_whose_database_is_lost_after_its_commit_is_reported(
    instance: Instance, dsn: str, tmp_path: Path
) -> None:
    fill(instance, "file_table")
    # every connection that asks for the present moment is lost
    with (
        closing(CuttingProxy(dsn, until(b"clock_timestamp() from tables where"))) as proxy,
        dm.connect(proxy.dsn, (tmp_path / "objects").as_uri()) as away,
    ):
        report = away.table(KEYED).delete({"v": 0})
    assert proxy.broken
    assert (report.rows, report.deleted_at) == (5, None)
    assert values(instance)[KEYED] == {}


@pytest.mark.parametrize("what", ["an update", "a merge into a keyed table", "a transaction"])
@pytest.mark.parametrize(
    "texts", [[b"select source from applied_commit", b"COMMIT\0"], [b"nextval('load_sequence') end"]]
)
def test_a_connection_that_is_lost_before_the_commit_leaves_no_doubt(
    instance: Instance, dsn: str, tmp_path: Path, texts: list[bytes], what: str
) -> None:
    """The connection is lost once, after these texts passed by."""
    fill(instance, "file_table")
    left = [*texts]

    def passes(data: bytes) -> int:
        if left and left[0] in data:
            del left[0]
            return len(data) if left else 0
        return len(data)

    with (
        closing(CuttingProxy(dsn, lambda: passes)) as proxy,
        dm.connect(proxy.dsn, (tmp_path / "objects").as_uri()) as away,
    ):
        EDITS[what][0](away, "one", 0)
    assert proxy.broken == 1
    assert values(instance) == expected(what, 1)


def test_a_transaction_killed_at_some_exchanges_is_done_or_not(instance: Instance, editors: Editors) -> None:
    fill(instance, "file_table")
    assert check_killed(instance, editors, "a transaction", first=3, step=12) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("inline_bytes_max", "layout"), [*zip((65_536, 0), LAYOUTS, strict=False)])
def test_a_delete_by_values_killed_at_each_exchange_is_done_or_not(
    instance: Instance, editors: Editors, inline_bytes_max: int, layout: str
) -> None:
    properties = dm.TableProperties(
        keep="newest_row",
        compaction_strategy="basic",
        inline_bytes_max=inline_bytes_max,
        gc_delay_seconds=0,
        attempt_expiry_seconds=0.0,
    )
    table = instance.create_table(KEYED, SCHEMA, layout=layout, properties=properties)
    left = [{"k": 2, "v": 2, "s": "other"}, {"k": 3, "v": 3, "s": "newer"}]
    gone = [{"k": 1, "v": 7, "s": "gone"}]
    killed, is_killed = 0, True
    while is_killed:
        table.upsert([*gone, left[0], {"k": 3, "v": 7, "s": "older"}])
        table.upsert(left[1:])
        killed += is_killed
        is_killed = editors.is_killed(BY_VALUES, "", 7, killed)
        found = table.query().read_all().to_pylist()
        assert found in ([*gone, *left], left) if is_killed else found == left, "half done"
        the_dead_are_known(table.context)
        table.delete({"v": 7})
        while table.compact(engine="local").jobs_run:
            assert table.query().read_all().to_pylist() == left
        table.collect_garbage()
    assert killed > 4
    assert instance.check(deep=True).problems == ()
    assert [*instance.orphans(timedelta(0))] == []


@pytest.mark.slow
@pytest.mark.parametrize(("what", "layout"), [*zip(EDITS, cycle(LAYOUTS), strict=False)])
def test_an_edit_killed_at_each_exchange_is_done_or_not(
    instance: Instance, editors: Editors, what: str, layout: str
) -> None:
    fill(instance, layout)
    assert check_killed(instance, editors, what, first=1, step=1) >= 6
