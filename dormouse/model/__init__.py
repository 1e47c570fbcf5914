"""The data types and rules of the domain, without input or output, clock or database."""
