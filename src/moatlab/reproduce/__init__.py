"""The paper's tables and figures, comparisons of methods, and benchmarks of the machine."""
