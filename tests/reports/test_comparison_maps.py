"""Attention maps of a comparison: what each panel is said to show."""

from matplotlib.figure import Figure

from reports import comparison_maps

ENCODER = "encoder layer 1, self-attention"
DECODER = "decoder layer 1, self-attention"


def sketch(title, **others):
  labels = ["a", "b"]
  return {
    "title": title,
    "query_axis": "query token",
    "key_axis": "key token",
    "query_labels": labels,
    "key_labels": labels,
    "weights": [[[1.0, 0.0], [0.5, 0.5]]],
    **others,
  }


def titles(found):
  """Label -> the title that is drawn above its panel, and the caption."""
  figure = comparison_maps.of_maps(
    "maps", "copy", found, {name: name for name in found}
  )
  drawn = {}
  for name, panel in figure.panels.items():
    axes = Figure().subplots()
    panel(axes)
    drawn[name] = axes.get_title()
  return drawn, figure.caption


def test_a_panel_says_what_it_shows_where_its_name_does_not():
  drawn, caption = titles(
    {
      "dense": sketch(ENCODER, mechanism="dense"),
      "delta": sketch(DECODER, mechanism="delta"),
      "hybrid": sketch(ENCODER, mechanism="my.module:decay"),
      "performer\nrate=1": sketch(ENCODER, mechanism="performer"),
      "causal": sketch(DECODER, mechanism="dense"),
    }
  )
  assert drawn == {
    "dense": "dense",
    "delta": f"delta\n{DECODER}",
    "hybrid": "hybrid\nmodule:decay",
    "performer\nrate=1": "performer\nrate=1",
    "causal": f"causal\ndense\n{DECODER}",
  }
  assert f"what {ENCODER} attends to" in caption
  assert caption.endswith(" A panel of another layer names it.")


def test_maps_of_one_layer_need_no_more_than_names():
  """Those of an older comparison do not say their mechanism."""
  drawn, caption = titles({"dense": sketch(ENCODER), "lsh": sketch(ENCODER)})
  assert drawn == {"dense": "dense", "lsh": "lsh"}
  assert "another layer" not in caption
