"""Pathfinder: does a dashed path connect two discs? Read pixel by pixel."""

from projects.pathfinder.configs.pathfinder import get_config

__all__ = ["get_config"]
