"""Imports of internals that many tests need, by topic, so that moving a module changes one line here.

A test imports a name from here if a topic has it. A test that replaces names of a module imports that module
itself.
"""
