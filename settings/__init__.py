"""Checks of what a user types: types, ranges, names and suggestions."""
