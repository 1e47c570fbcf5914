"""Checks of damaged partition trees, of values of all types, and of the list of objects that a check
makes.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability import checking
from dormouse.durability.checking import by_file
from tests.stored import query
from tests.support.api import Instance
from tests.support.model import narrow_id
from tests.support.objects import SKETCHES_SUFFIX

SCHEMA = dm.Schema(row_keys=[dm.Field("key", dm.LONG), dm.Field("name", dm.STRING)])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "damage",
    [
        "delete from partition where parent_id is null",
        "delete from partition where ctid = (select max(ctid) from partition where sealed_epoch is null)",
        "update partition set max_keys[1] = '\\x8000000000000001'"
        " where partition_id = (select min(left_id) from partition)",
        "update partition set min_keys[2] = '\\x41'"
        " where partition_id = (select min(right_id) from partition)",
        "update partition set split_point = '\\x8000000000000001' where parent_id is null",
        "update partition set parent_id = 'unknown' where sealed_epoch is null",
        "update partition set created_epoch = created_epoch + 7, sealed_epoch = sealed_epoch + 7"
        " where parent_id is not null and merged_epoch is null",
        "delete from partition where partition_id = '4-0'",
        "delete from partition where partition_id = '3-0'",
        "update partition set merged_epoch = 5 where partition_id = '3-1'",
        "update partition set merged_id = '1-1' where partition_id = '3-1'",
        "update partition set right_id = '1-1' where partition_id = '2-0'",
        "update partition set left_id = '3-0' where right_id = '2-1'",
        "update partition set is_upper = not is_upper where partition_id = '4-0'",
        "update partition set created_epoch = 5 where partition_id = '4-0'",
        "delete from epoch where epoch = 0",
        "delete from epoch where epoch = 1",
        "delete from epoch",
        "update epoch set created = '{}' where epoch = 1",
        "update epoch set sealed = created where epoch = 1",
    ],
)
def test_damage_to_a_partition_tree_is_found(instance: Instance, damage: str) -> None:
    """Covers lost and changed rows of partitions and of epochs."""
    table = instance.create_table("u", SCHEMA, split_points=[1_000])
    table.partitions.split(table.partitions.leaves()[0].partition_id, 100)
    table.partitions.split(table.partitions.leaves()[0].partition_id, "m", "name")
    left = table.partitions.leaves()[0].partition_id
    table.partitions.merge([half.partition_id for half in table.partitions.split(left, 50)])
    assert instance.check().problems == ()
    query(instance._supplier, damage.replace("%", "%%"))
    problems = instance.check(table="u").problems
    assert {problem.kind for problem in problems} == {"partitions"}


def test_files_with_values_of_all_types_pass_a_deep_check(instance: Instance) -> None:
    """Writers may leave statistics out, shorten them or compare them in another way. None of this is a
    problem.
    """
    schema = dm.Schema(
        row_keys=[dm.Field("name", dm.STRING), dm.Field("raw", dm.BYTES), dm.Field("small", dm.INT)],
        values=[
            dm.Field("double", dm.DOUBLE, nullable=True),
            dm.Field("time", dm.TIMESTAMP, nullable=True),
            dm.Field("truth", dm.BOOLEAN, nullable=True),
            dm.Field("text", dm.STRING, nullable=True),
            dm.Field("tags", dm.LIST(dm.STRING), nullable=True),
            dm.Field("map", dm.MAP(dm.STRING, dm.LONG)),
            dm.Field("nothing", dm.LONG, nullable=True),
        ],
    )
    table = instance.create_table(
        "all", schema, properties=dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
    )
    long = "\U0001f600é" * 40
    doubles = [float("nan"), -0.0, 0.0, None, float("inf"), float("-inf")]
    for start in (0, 1):
        table.ingest(
            pa.table(
                {
                    "name": pa.array(["", long, long + "z", "\U0010ffff" * 30, "a\0b", "a"]),
                    "raw": pa.array([b"", b"\xff" * 100, b"\0", b"\x80", b"\x7f", b"x"]),
                    "small": pa.array([-(1 << 31), (1 << 31) - 1, 0, -1, 1, start], pa.int32()),
                    "double": pa.array(doubles),
                    "time": pa.array([None, 0, -1, 1, 1 << 50, -(1 << 50)], pa.timestamp("us", "UTC")),
                    "truth": pa.array([True, False, None, True, True, True]),
                    "text": pa.array([long, None, "", "\xff" * 70, "b", "\U0010ffff" * 40]),
                    "tags": pa.array([[long], None, [], [None], ["a", "b"], ["c"]], pa.list_(pa.string())),
                    "map": pa.array([[("a", 1)]] * 6, pa.map_(pa.string(), pa.int64())),
                    "nothing": pa.nulls(6, pa.int64()),
                }
            )
        )
    assert instance.check(deep=True).problems == ()
    table.compact()
    assert instance.check(deep=True).problems == ()


def test_a_listing_of_any_length_is_sorted_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "RUN_OBJECTS", 7)
    objects = [(f"data/{number} é\n{SKETCHES_SUFFIX * (number % 2)}", number) for number in range(100)]
    listed = list(by_file(objects))
    assert sorted(one for _, one in listed) == sorted(objects)
    ids = [narrow_id(name.removesuffix(SKETCHES_SUFFIX)).hex for _, (name, _) in listed]
    assert ids == sorted(ids) == [file_id for file_id, _ in listed]
