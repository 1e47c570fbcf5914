"""The query service: HTTP over an instance, for programs without Python, or without a way to the database."""

from dormouse.service.app import create_app
from dormouse.service.supervisor import Server, Supervisor, check, url_of, worker_given, worker_ready

__all__ = ["Server", "Supervisor", "check", "create_app", "url_of", "worker_given", "worker_ready"]
