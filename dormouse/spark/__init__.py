"""Spark: the session, large ingests, and compaction jobs as tasks. Everything of pyspark lives here."""
