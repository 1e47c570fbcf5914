"""Shared parts of the benchmarks: arguments, a private server, processes, ratios, tables and plots."""
