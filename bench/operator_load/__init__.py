"""Load on an operator: fake nodes, objects, drivers that answer, and what the operator costs. For operator_bench.py."""
