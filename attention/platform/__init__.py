"""What differs between CPU, GPU and TPU, and how arrays are laid out."""

from attention.platform.backend import portable as portable
from attention.platform.backend import tracing_for as tracing_for
