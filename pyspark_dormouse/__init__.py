"""The package by which Spark finds `format("dormouse")`.

Spark registers the `DefaultSource` of each package whose name begins with `pyspark_`.
"""

from dormouse.datasource.source import DormouseSource as DefaultSource

__all__ = ["DefaultSource"]
