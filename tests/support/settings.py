"""Settings of processes, lambdas, the service and deployments."""

from __future__ import annotations

from dormouse.settings import load_settings
from dormouse.settings.config_file import parse
from dormouse.settings.lambdas import RunsEnvironment, load_environment
from dormouse.settings.service import load_service_settings

__all__ = [
    "RunsEnvironment",
    "load_environment",
    "load_service_settings",
    "load_settings",
    "parse",
]
