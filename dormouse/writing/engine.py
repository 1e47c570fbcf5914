"""Where work runs: in this process, or on Spark."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from dormouse.errors import InvalidInput
from dormouse.settings.process import load_settings, machine_bytes

T = TypeVar("T")
ENGINES = ("auto", "local", "spark")
CLUSTER_BYTES_MIN = 256 * 1024 * 1024
"""Less is done here before a cluster has begun."""


def check_engine(engine: str) -> None:
    """Refuses an engine that does not exist."""
    if engine not in ENGINES:
        raise InvalidInput(f"engine {engine!r} is not known; use auto, local or spark")


def choose_engine(engine: str, byte_count: Callable[[], int], local: T, spark: T | None) -> T:
    """One of the two.

    `auto` takes Spark where it is installed and at hand, and there is a cluster for 256 MiB or more; without
    one, for files that are larger than this machine's memory. On one machine it is the slower of the two.
    """
    if engine == "auto":
        is_for_spark = spark is not None and find_spec("pyspark") is not None and byte_count() >= _bytes_min()
        engine = "spark" if is_for_spark else "local"
    if engine == "local":
        return local
    if spark is None:
        raise InvalidInput("engine 'spark' is not at hand here; use auto or local")
    return spark


def _bytes_min() -> int:
    return CLUSTER_BYTES_MIN if has_cluster() else machine_bytes()


def has_cluster() -> bool:
    """Whether Spark runs on other machines: by the session that there is, else by the settings."""
    return not (_running_master() or load_settings().spark_master or "local").startswith("local")


def _running_master() -> str | None:
    """Of a session of this process. Without importing pyspark, which the maker of one has done."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    running = getattr(context, "_active_spark_context", None)
    return None if running is None else str(running.master)
