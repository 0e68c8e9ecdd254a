"""Pathfinder: does a dashed path connect two discs? The model reads pixel by pixel."""

TASKS = {"pathfinder": "projects.pathfinder.task:PathfinderConfig"}
