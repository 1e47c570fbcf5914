"""The release of EMR for which the archive is built."""

RELEASE = "emr-spark-8.0.0"
"""The release of EMR. It contains Spark 4.0.2 and Python 3.11."""
