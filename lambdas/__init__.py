"""The AWS lambdas: each parses its event, makes one call, and answers."""
