"""Differences between CPU, GPU and TPU, and the layout of arrays."""

from attention.platform.backend import portable as portable
from attention.platform.backend import tracing_for as tracing_for
