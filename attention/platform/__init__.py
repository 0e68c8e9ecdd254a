"""Properties of CPUs, GPUs and TPUs, and operations on blocks of arrays."""

from attention.platform.backend import portable as portable
from attention.platform.backend import tracing_for as tracing_for
