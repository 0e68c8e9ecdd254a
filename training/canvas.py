"""Matplotlib without a window, imported where something is drawn."""


def import_matplotlib() -> tuple[type, type]:
  """`FigureCanvasAgg` and `Figure`; takes half a second the first time."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  return FigureCanvasAgg, Figure
