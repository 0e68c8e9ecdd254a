"""Swaps the mechanism of a trained model and measures the effect, for `swap.py`.

`settings` has the options, `source` reads the original model, and `substitution` has
pure functions that substitute a mechanism in its layers. `transfer` fits the mechanism
to the attention that it replaces, `measure` measures one mechanism, `records` stores
the results, and `report` writes the report.
"""
