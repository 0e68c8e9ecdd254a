"""Pathfinder: whether two discs lie on one dashed path, pixel by pixel."""

from projects.pathfinder.configs.pathfinder import get_config

__all__ = ["get_config"]
