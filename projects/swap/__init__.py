"""Swaps the mechanism of a trained model and measures the effect, for `swap.py`.

`settings` is what a user asked for, `source` the model as it is, `substitution`
the pure functions that put a mechanism into its layers, `transfer` how the
mechanism is fitted to what it replaces, `measure` what is found out about one
mechanism, `records` what is kept of it, `files` its report.
"""
