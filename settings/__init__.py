"""Validation of user input: types, ranges, names and suggestions."""
