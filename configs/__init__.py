"""Experiments, one file a task; `FILE.py:MECHANISM` picks the attention."""
