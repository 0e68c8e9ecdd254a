"""Experiments, one file per task; `FILE.py:MECHANISM` selects the mechanism."""
