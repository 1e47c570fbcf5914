"""Settings: of a process (from its environment), of a lambda, and of a deployment (from its file)."""

from dormouse.settings.process import Settings, environment, load_settings

__all__ = ["Settings", "environment", "load_settings"]
