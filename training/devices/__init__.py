"""Meshes, processes, compiled programs and what they cost."""
