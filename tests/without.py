"""A Python in which some modules are not there."""

BLOCKED = """
import json, sys

class NotThere:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in json.loads(sys.argv[1]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotThere)
"""
"""The beginning of a program, whose first argument names them as JSON."""
