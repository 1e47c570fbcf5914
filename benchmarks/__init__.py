"""One script per question: `python -m benchmarks.NAME` prints a table, or one JSON object with `--json`."""
