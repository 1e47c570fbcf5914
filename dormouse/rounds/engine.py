"""Where work runs: small data in this process, large data on Spark."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from dormouse.errors import InvalidInput

T = TypeVar("T")
ENGINES = ("auto", "local", "spark")
SPARK_BYTES_MIN = 256 * 1024 * 1024


def check_engine(engine: str) -> None:
    """Refuses an engine that does not exist."""
    if engine not in ENGINES:
        raise InvalidInput(f"engine {engine!r} is not known; use auto, local or spark")


def choose_engine(engine: str, byte_count: Callable[[], int], local: T, spark: T | None) -> T:
    """One of the two; `auto` takes Spark for 256 MiB and more, where it is installed and at hand."""
    if engine == "auto":
        is_large = spark is not None and byte_count() >= SPARK_BYTES_MIN
        engine = "spark" if is_large and find_spec("pyspark") is not None else "local"
    if engine == "local":
        return local
    if spark is None:
        raise InvalidInput("engine 'spark' is not at hand here; use auto or local")
    return spark
