"""The query service: HTTP over an instance, for programs without Python, or without a way to the database."""

from dormouse.service.app import create_app
from dormouse.service.server import Server, check

__all__ = ["Server", "check", "create_app"]
