"""The query service: HTTP over an instance, for who has no Python, or no way to the database."""

from dormouse.service.app import create_app
from dormouse.service.server import Server, check

__all__ = ["Server", "check", "create_app"]
