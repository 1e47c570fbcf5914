"""Module by which Spark finds `format("dormouse")`: it takes DefaultSource from each `pyspark_…` package."""

from dormouse.datasource.source import DormouseSource as DefaultSource

__all__ = ["DefaultSource"]
