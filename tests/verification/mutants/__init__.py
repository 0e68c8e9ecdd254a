"""Faults that the suite has to find, see `python -m tests.verification.mutants`."""
