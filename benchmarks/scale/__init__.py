"""What grows with the size of an instance."""
