"""The settings of a process, of each lambda and of a deployment.

A process and a lambda read them from the environment, and a deployment from a TOML file.
"""

from dormouse.settings.process import Settings, environment, load_settings

__all__ = ["Settings", "environment", "load_settings"]
