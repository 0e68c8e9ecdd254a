"""Comparisons of mechanisms: plan, runs, results."""

import training  # noqa: F401 - sets a flag of XLA before `attention` looks for it
