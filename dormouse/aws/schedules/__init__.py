"""The work of scheduled lambdas: rounds of garbage collection and upkeep, runs of Spark, migrations."""
