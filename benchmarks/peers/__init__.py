"""How many commits can one table take? Dormouse's state store beside other open table formats."""
