"""The costs of a run: time, memory, floating-point operations."""
