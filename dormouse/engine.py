"""Where work runs: small data in this process, large data on Spark."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from dormouse.errors import InvalidInput

ENGINES = ("auto", "local", "spark")
SPARK_BYTES_MIN = 256 * 1024 * 1024


def check_engine(engine: str) -> None:
    """Refuses an engine that does not exist."""
    if engine not in ENGINES:
        raise InvalidInput(f"engine {engine!r} is not known; use auto, local or spark")


def choose_engine(engine: str, byte_count: Callable[[], int]) -> str:
    """`local` or `spark`; `auto` takes Spark for 256 MiB and more, where it is installed."""
    if engine != "auto":
        return engine
    return "spark" if byte_count() >= SPARK_BYTES_MIN and find_spec("pyspark") is not None else "local"
