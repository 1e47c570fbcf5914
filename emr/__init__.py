"""What Spark on EMR runs: an archive with a Python environment, which `make emr-package` builds."""
