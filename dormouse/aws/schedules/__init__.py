"""What timers and lambdas run: rounds of collection and upkeep, runs of Spark, migrations."""
