"""The pure domain: no input or output, no clock, no database."""
