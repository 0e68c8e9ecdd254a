"""Meshes, processes, compiled programs and their costs."""
