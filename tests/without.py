"""A Python process in which some modules cannot be imported."""

BLOCKED = """
import json, sys

class NotThere:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in json.loads(sys.argv[1]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotThere)
"""
"""The beginning of a program. Its first argument is a JSON list of the blocked modules."""
