"""Flags, help and errors of the entry points."""
