"""What a run costs: time, memory, floating-point operations."""
