"""Errors of Spark tasks, which reach the caller in one line."""

from __future__ import annotations

import pytest

from dormouse import errors
from dormouse.errors import DormouseError, InvalidData, JobFailed, ObjectDamaged
from dormouse.spark.tasks import dormouse_error


@pytest.mark.parametrize(
    "raised",
    [
        InvalidData("row 3 has no key"),
        ObjectDamaged("t", "root", "data/a.parquet", "has 3 bytes"),
        errors.FileNotFound("t", "data/a.parquet"),
    ],
)
def test_an_error_of_dormouse_keeps_its_class_and_line(raised: DormouseError) -> None:
    spark = RuntimeError(
        f"Job aborted\n{type(raised).__module__}.{type(raised).__name__}: {raised}\n\tat java"
    )
    found = dormouse_error(spark)
    assert (type(found), str(found)) == (type(raised), str(raised))


def test_another_error_is_a_failed_job() -> None:
    assert isinstance(dormouse_error(RuntimeError("java.lang.OutOfMemoryError")), JobFailed)
