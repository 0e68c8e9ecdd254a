"""Names at the ends of curves and at points of a plot, without overlaps."""
