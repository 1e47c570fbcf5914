"""The old name of `dormouse.state.commits`, which other programs import."""
