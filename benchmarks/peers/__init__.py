"""The benchmark of commits to one table: Dormouse's state store and other open table formats."""
