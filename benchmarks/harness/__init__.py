"""What benchmarks share: arguments, a server of their own, processes, medians and ratios, tables, plots."""
