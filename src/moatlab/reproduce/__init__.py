"""Reproduce the paper's tables and figures, compare methods, benchmark the machine."""
