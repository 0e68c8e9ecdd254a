"""Pictures of a swap say what in them belongs to which mechanism."""

from xml.etree import ElementTree

from projects.swap import figures as swap_figures
from projects.swap.records import OWN
from reports import figures, style
from tests.reports.test_marks import owned


def test_a_swaps_heat_map_loses_a_row():
  found = [
    {"attention": OWN, "status": "done", "swaps": [{"loss": 2.0}]},
    *(
      {
        "attention": label,
        "status": "done",
        "swaps": [{"loss": 2.5}],
        "layers": [
          {"side": "decoder", "layer": n, "error": 0.25, "loss": 2.1}
          for n in range(3)
        ],
      }
      for label in ("nystrom", "window_linear:window=4")
    ),
  ]
  styles = style.styles(record["attention"] for record in found)
  heat = next(
    one for one in swap_figures.figures(found, styles) if one.stem == "layers"
  )
  panel = next(iter(figures.inline(heat).values()))
  for label in ("nystrom", "window_linear:window=4"):
    marked = [
      one for one, who in owned(ElementTree.fromstring(panel)) if who == label
    ]
    assert sum(one.tag == "image" for one in marked) == 1
    texts = [one.text for one in marked if one.tag == "text"]
    assert texts.count("0.25") == 3
    assert label.partition(":")[0] in "".join(map(str, texts))
