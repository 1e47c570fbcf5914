"""The internals that many tests need, by themes, so that the move of a module changes one line here.

A test imports from here each name that a theme has; a module whose names a test replaces it imports itself.
"""
