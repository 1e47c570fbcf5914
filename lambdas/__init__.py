"""The AWS lambdas. Each parses its event, makes one call of Dormouse, and answers."""
