"""The work of timers and lambdas: rounds of collection and upkeep, runs of Spark, migrations."""
