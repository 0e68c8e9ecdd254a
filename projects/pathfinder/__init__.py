"""Pathfinder: does a dashed path connect two discs? The input is a pixel sequence."""

TASKS = {"pathfinder": "projects.pathfinder.task:PathfinderConfig"}
