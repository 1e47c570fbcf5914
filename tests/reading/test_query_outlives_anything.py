"""Queries of random tables during random compactions, splits and collections."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from outliving import EVENTS, GONE, NewLake, bag, event, key, replace_all_files
from query_lake import Lake

from dormouse.postgres import ConnectionSupplier
from dormouse.reading import scan_session, streams
from tests.support.reading import query
from tests.support.writing import split

_names = count()


@pytest.fixture
def new_lake(shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path) -> NewLake:
    dsn, supplier = shared_supplier
    return lambda **more: Lake(
        dsn, supplier, tmp_path, EVENTS, name=f"random_{next(_names)}", **{**GONE, **more}
    )


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits batches to a few rows, so that files can disappear after any few rows."""
    monkeypatch.setattr(streams, "AHEAD_BYTES", 1)
    monkeypatch.setattr(scan_session, "_key_sessions", {})
    monkeypatch.setitem(scan_session._OPTIONS, "datafusion.execution.batch_size", "16")


step = st.sampled_from(["compact", "split", "add nothing", "read"])


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    seed=st.integers(0, 2**32),
    files=st.integers(1, 4),
    names=st.sampled_from(["a", "ab", "abcdefgh"]),
    columns=st.sampled_from([None, ["n"], ["time", "n"]]),
    limit=st.sampled_from([None, None, 50, 300]),
    steps=st.lists(step, min_size=1, max_size=30),
)
def test_every_row_is_returned_once_despite_concurrent_maintenance(
    new_lake: NewLake,
    seed: int,
    files: int,
    names: str,
    columns: list[str] | None,
    limit: int | None,
    steps: list[str],
) -> None:
    rng = random.Random(seed)
    lake = new_lake(split_points=sorted(rng.sample("bcdefgh", rng.randrange(4))))
    for _ in range(files):
        lake.add([event(rng, names) for _ in range(rng.randrange(1, 200))], one_file=rng.random() < 0.3)
    expected = sorted(lake.all.to_pylist(), key=key)
    found: list[dict[str, Any]] = []
    upcoming = iter(steps)
    for batch in query(lake.context, columns=columns, limit=limit):
        found += batch.to_pylist()
        change(lake, next(upcoming, "read"), rng)
    chosen = columns or list(lake.schema.names)
    assert len(found) == len(expected[:limit])
    whole = bag({name: row[name] for name in chosen} for row in expected)
    assert not bag(found) - whole
    if columns is None:
        assert [key(row) for row in found] == [key(row) for row in expected[:limit]]
    if limit is None:
        assert bag(found) == whole


def change(lake: Lake, step: str, rng: random.Random) -> None:
    match step:
        case "compact":
            replace_all_files(lake)
        case "split":
            leaf = rng.choice(lake.context.partitions.leaves())
            name = leaf.region.range("name")
            points = [c for c in "bcdefgh" if (name.min or "") < c and (name.max is None or c < name.max)]
            if points:
                lake.context.partitions.split(leaf.partition_id, rng.choice(points))
                split(lake.context)
