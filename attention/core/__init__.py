"""Keeps the documented import path of `attention.platform`."""
