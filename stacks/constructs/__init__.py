"""The constructs that the stacks use."""
