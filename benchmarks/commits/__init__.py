"""The benchmark of commits: the number that the state store applies in a second."""
