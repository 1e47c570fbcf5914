"""The release of EMR that the archive is built for."""

RELEASE = "emr-spark-8.0.0"
"""Spark 4.0.2 with Python 3.11."""
