"""`attention.platform` under the path that it had."""

from attention.platform import name, profile, tracing_for

__all__ = ["name", "profile", "tracing_for"]
