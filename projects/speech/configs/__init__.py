"""The experiments of this project."""
