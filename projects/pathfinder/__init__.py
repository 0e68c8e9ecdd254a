"""Pathfinder: whether a dashed path joins two dots, read pixel by pixel."""

TASKS = {"pathfinder": "projects.pathfinder.task:PathfinderConfig"}
