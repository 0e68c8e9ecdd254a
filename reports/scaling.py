"""Time and memory of the attention alone, against length."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from reports import axes as axes_lib
from reports import marks, quality, words
from reports.figures import Figure, Panel
from reports.labels import Finish, Label
from reports.style import Style


def figures(
  rows: Sequence[Mapping[str, Any]], styles: Mapping[str, Style]
) -> list[Figure]:
  """Time and memory against length, a figure for causal and for full attention.

  Args:
    rows: a mapping a measurement: 'mechanism', 'causal', 'part', 'length',
      'seconds', 'spread' and 'temp_bytes'.
    styles: label of a mechanism -> how it is drawn.
  """
  found = []
  for causal in (False, True):
    of_kind = [row for row in rows if row["causal"] == causal]
    panels: dict[str, Panel] = {}
    parts = dict.fromkeys(row["part"] for row in of_kind)
    for name, label, unit in (
      ("seconds", "time", "s"),
      ("temp_bytes", "temporary memory", "B"),
    ):
      for part in parts:
        have = [
          row
          for row in of_kind
          if row["part"] == part and _is_drawable(row.get(name))
        ]
        if have:
          panels[f"{part}, {label}"] = functools.partial(
            _panel, have, styles, name, f"{part}, {label}", unit
          )
    if panels:
      kind = "causal" if causal else "full"
      caption = (
        f"Attention alone, {'' if causal else 'not '}causal, against the "
        "length of the sequence. Bands are the middle half of the repetitions; "
        "dotted grey lines grow as T and T². Measured by `python -m "
        "benchmarks.scaling`."
      )
      found.append(Figure(f"scaling-{kind}", caption, panels, len(parts)))
  return found


def _is_drawable(value: Any) -> bool:
  """Whether it is on a logarithmic axis: a program may need no memory."""
  return quality.is_number(value) and value > 0


def _panel(
  have: Sequence[Mapping[str, Any]],
  styles: Mapping[str, Style],
  name: str,
  label: str,
  unit: str,
  axes: Any,
) -> Finish:
  last = []
  by_mechanism: dict[str, list[Mapping[str, Any]]] = {}
  for row in sorted(have, key=lambda row: row["length"]):
    by_mechanism.setdefault(row["mechanism"], []).append(row)
  for mechanism, rows in by_mechanism.items():
    style = styles[mechanism]
    x = [row["length"] for row in rows]
    y = [row[name] for row in rows]
    spread = [row.get("spread") or 0.0 for row in rows]
    with marks.of(axes, mechanism):
      axes.plot(x, y, color=style.color, linestyle=style.dash)
      axes.plot(
        x,
        y,
        color=style.color,
        marker=style.marker,
        markersize=3.5,
        linewidth=0,
      )
      if name == "seconds" and any(spread):
        pairs = list(zip(y, spread, strict=True))
        axes.fill_between(
          x,
          [max(v - s, v / 10) for v, s in pairs],
          [v + s for v, s in pairs],
          color=style.color,
          alpha=0.1,
          linewidth=0,
        )
    # The baseline's name is longer than the margin.
    name_there = mechanism.removesuffix(".dot_product_attention")
    beside = Label(words.beside(name_there), x[-1], y[-1], style.color)
    last.append((mechanism, beside))
  axes_lib.against_length(
    axes, [row["length"] for row in have], [row[name] for row in have], unit
  )
  axes_lib.guides(axes)
  axes.set_xlabel("length, tokens")
  axes.set_ylabel(label)
  return marks.ends(axes, last)
