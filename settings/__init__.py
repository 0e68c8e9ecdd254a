"""Checks of user input: types, ranges, names and suggestions."""
