"""The module by which Spark finds `format("dormouse")`: it takes DefaultSource of each `pyspark_…` package."""

from dormouse.datasource.source import DormouseSource as DefaultSource

__all__ = ["DefaultSource"]
