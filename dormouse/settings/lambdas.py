"""The environment of each lambda, typed."""

from __future__ import annotations

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from dormouse.errors import InvalidInput
from dormouse.settings.process import PREFIX, problem


class LambdaSettings(BaseSettings):
    """What a lambda needs to know of its instance; build it with `load_lambda_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True
    )

    dsn: str = Field(repr=False, min_length=1)
    """The instance's PostgreSQL."""

    objects: str = Field(min_length=1)
    """The instance's object store: s3://bucket/prefix or file:///path."""


def load_lambda_settings() -> LambdaSettings:
    """The settings of a lambda's environment; raises InvalidInput that names the bad and missing ones."""
    try:
        return LambdaSettings()
    except ValidationError as error:
        raise InvalidInput("; ".join(problem(one) for one in error.errors())) from None
