"""The archive with the Python environment for Spark on EMR, built by `make emr-package`."""
