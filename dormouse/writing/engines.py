"""The choice of the engine of a task: this process, or Spark."""

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
"""The least size of data for a Spark cluster. This process loads smaller data before a cluster starts."""


def check_engine(engine: str) -> None:
    """Raises `InvalidInput` for an unknown engine."""
    if engine not in ENGINES:
        raise InvalidInput(f"engine {engine!r} is not known; use auto, local or spark")


def choose_engine(engine: str, byte_count: Callable[[], int], local: T, spark: T | None) -> T:
    """Returns `local` or `spark`, the two implementations of a task, by the name of the engine.

    The engine `auto` chooses `spark` only if Spark is installed, `spark` is given, and the data is large.
    With a cluster, data of 256 MiB is large. Without a cluster Spark is slower, and data is large if it
    exceeds this machine's memory. Raises `InvalidInput` for the engine `spark` if `spark` is None.
    """
    if engine == "auto":
        # the size first: it is 0 for data in memory, for which the other questions would take long
        size = 0 if spark is None else byte_count()
        is_for_spark = size and find_spec("pyspark") is not None
        is_large = is_for_spark and size >= (CLUSTER_BYTES_MIN if has_cluster() else machine_bytes())
        engine = "spark" if is_large else "local"
    if engine == "local":
        return local
    if spark is None:
        raise InvalidInput("engine 'spark' is not available here; use auto or local")
    return spark


def has_cluster() -> bool:
    """Returns whether Spark runs on other machines: by the active session, or else by the settings."""
    # without importing pyspark: a process with a session has imported it
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    running = getattr(context, "_active_spark_context", None)
    master = str(running.master) if running is not None else load_settings().spark_master or "local"
    return not master.startswith("local")
