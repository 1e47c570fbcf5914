"""What all errors are."""


class DormouseError(Exception):
    """The root of every error that Dormouse raises."""
