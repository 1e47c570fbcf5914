"""The release of EMR that the archive is built for."""

RELEASE = "emr-spark-8.0.0"
"""The release with Spark 4.0.2 and Python 3.11."""
