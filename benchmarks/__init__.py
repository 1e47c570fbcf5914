"""Benchmarks: `python -m benchmarks.NAME` prints tables of figures, or one JSON object with `--json`."""
