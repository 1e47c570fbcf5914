"""Reads, writes and errors through Spark, which are the same as through every other door."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.doors import test_door_reads, test_door_writes
from tests.every_door import Door, Failed, House, Job, Python
from tests.flipped_bits import damage
from tests.spark_door import Spark

READS = [case for case in test_door_reads.READS if hasattr(Spark, case[0])]
REFUSED = [
    *(case for case in test_door_reads.REFUSED if hasattr(Spark, case[0])),
    ("query", {"table": "flights", "limit": -1}, "InvalidInput"),
    ("query", {"table": "flights", "offset": "x"}, "InvalidInput"),
    ("query", {"table": "flights", "descending": "perhaps"}, "InvalidInput"),
    ("changes", {"table": "flights", "after": "first", "limit": 3}, "InvalidInput"),
]
CHANGES = [case for case in test_door_writes.CHANGES if hasattr(Spark, case[1]) and "engine" not in case[2]]
ON_SPARK: list[tuple[str, dict[str, Any]]] = [
    ("ingest", {"content": test_door_writes.CSV, "name": "new.csv"}),
    ("compact", {"full": True}),
]


@pytest.fixture
def door(spark: SparkSession, house: House) -> Spark:
    return Spark(house, spark)


@pytest.fixture
def python(house: House) -> Python:
    return Python(house)


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "how"), READS[::-1])
def test_spark_gives_the_same_answer(door: Door, python: Door, verb: str, how: dict[str, Any]) -> None:
    expected = python.ask(verb, **how)
    assert not isinstance(expected, Failed), expected
    assert door.ask(verb, **how) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize(("verb", "how", "error"), REFUSED[::-1])
def test_spark_refuses_the_same_request(
    door: Door, python: Door, verb: str, how: dict[str, Any], error: str
) -> None:
    failed = door.ask(verb, **how)
    assert isinstance(failed, Failed) and failed.error == error, failed
    if error != "InvalidInput":
        assert failed == python.ask(verb, **how)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "verb", "how"), CHANGES)
def test_spark_adds_the_same_rows(
    door: Door, python: Door, make: test_door_writes.Make, verb: str, how: dict[str, Any]
) -> None:
    _, expected = test_door_writes.done_by(python, make, verb, how)
    answer, rows = test_door_writes.done_by(door, make, verb, how)
    assert answer is None, answer
    assert rows == expected


@pytest.mark.objects
@pytest.mark.slow
def test_spark_returns_no_rows_of_a_damaged_file_with_verify(door: Spark, python: Python) -> None:
    table = door.house.instance.create_table("damaged", test_door_writes.SCHEMA)
    table.ingest([{"k": k, "v": f"value {k % 17}"} for k in range(300)])
    path = damage(table)
    for how in ({}, {"limit": 5}, {"descending": True}):
        for reader in (python, door):
            failed = reader.ask("query", table="damaged", verify=True, **how)
            assert isinstance(failed, Failed) and failed.error == "ObjectDamaged", (reader, how, failed)
            assert path.name in failed.text
    damage(table)  # the bit flips back
    assert door.ask("query", table="damaged", verify=True) == python.ask("query", table="damaged")


@pytest.mark.objects  # Spark writes objects
@pytest.mark.slow
@pytest.mark.parametrize(("verb", "how"), ON_SPARK)
def test_a_job_on_spark_gives_the_same_report_as_a_call(
    spark: SparkSession, house: House, python: Python, verb: str, how: dict[str, Any]
) -> None:
    make = test_door_writes.plain_table
    expected = test_door_writes.done_by(python, make, verb, how)
    assert not isinstance(expected[0], Failed), expected
    for door in (python, Job(house)):
        answer, rows = test_door_writes.done_by(door, make, verb, {**how, "engine": "spark"})
        assert not isinstance(answer, Failed), answer
        assert rows == expected[1]
        assert answer == expected[0], type(door).__name__
