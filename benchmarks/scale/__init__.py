"""The benchmark of growth with the size of an instance."""
