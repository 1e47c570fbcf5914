"""How Spark finds `format("dormouse")`: of each package called `pyspark_…` it takes the DefaultSource."""

from dormouse.datasource.source import DormouseSource as DefaultSource

__all__ = ["DefaultSource"]
