"""What does a change cost? Deletes and upserts of Dormouse beside delta-rs, DuckLake and PyIceberg."""
