"""The old name of `dormouse.aws`, which other programs import."""
