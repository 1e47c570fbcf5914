"""Tests of the automatic choice of an engine: this process, or Spark for work that exceeds its memory."""

from __future__ import annotations

from types import SimpleNamespace

import pyspark
import pytest

from dormouse.errors import InvalidInput
from dormouse.writing import engines
from dormouse.writing.engines import CLUSTER_BYTES_MIN, choose_engine, has_cluster

MACHINE_BYTES = 10 * CLUSTER_BYTES_MIN


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "machine_bytes", lambda: MACHINE_BYTES)
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)


def chosen(byte_count: int, spark: str | None = "spark") -> str | None:
    return choose_engine("auto", lambda: byte_count, "local", spark)


@pytest.mark.parametrize("master", [None, "local[*]", "local[4]"])
def test_a_single_machine_uses_spark_only_for_data_that_exceeds_its_memory(
    monkeypatch: pytest.MonkeyPatch, master: str | None
) -> None:
    if master is not None:
        monkeypatch.setenv("DORMOUSE_SPARK_MASTER", master)
    assert not has_cluster()
    assert [chosen(size) for size in (0, CLUSTER_BYTES_MIN, MACHINE_BYTES - 1)] == ["local"] * 3
    assert chosen(MACHINE_BYTES) == "spark"


@pytest.mark.parametrize("master", ["yarn", "spark://host:7077", "k8s://https://host:443"])
def test_a_cluster_is_used_for_large_data(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setenv("DORMOUSE_SPARK_MASTER", master)
    assert has_cluster()
    assert (chosen(CLUSTER_BYTES_MIN - 1), chosen(CLUSTER_BYTES_MIN)) == ("local", "spark")


@pytest.mark.parametrize(("running", "expected"), [("yarn", True), ("local[2]", False)])
def test_a_running_session_takes_precedence_over_the_settings(
    monkeypatch: pytest.MonkeyPatch, running: str, expected: bool
) -> None:
    monkeypatch.setenv("DORMOUSE_SPARK_MASTER", "local[4]" if expected else "spark://host:7077")
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", SimpleNamespace(master=running))
    assert has_cluster() is expected


def test_without_spark_this_process_does_all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(MACHINE_BYTES, None) == "local"
    with pytest.raises(InvalidInput, match="is not available here"):
        choose_engine("spark", lambda: 0, "local", None)
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    assert chosen(MACHINE_BYTES) == "local"
