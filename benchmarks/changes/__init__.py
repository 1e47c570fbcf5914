"""The benchmark of deletes and upserts: Dormouse, delta-rs, DuckLake and PyIceberg."""
