"""Sentences on the results of a comparison, and their numbers and names."""

from collections.abc import Sequence
import math
from typing import Any

import pandas as pd

from comparison.analysis.summary import has_solved_seeds

NOTHING_FOUND = "No run has finished yet."


def finding(summary: pd.DataFrame) -> str:
  """A sentence that states the result of one task."""
  ended = summary[summary["seeds"] > 0]
  if ended.empty:
    return NOTHING_FOUND
  best, others = ended.iloc[0], len(ended) - 1
  so_far = "" if best["is_complete"] else "So far: "
  if not others:
    reached = f"{best['metric']} {number(best['mean'])}"
    if has_solved_seeds(ended):
      reached = (
        f"{best['solved']:.0f} of {best['trials']:.0f} seeds have {best['metric']} "
        f"of {best['solved_at']:g} or more"
      )
    return (
      f"{so_far}Only `{best['name']}` has finished: {reached} on the "
      f"{best['split']} split."
    )
  if has_solved_seeds(ended):
    text = f"{_solved_sentence(ended)}; {int((ended['solved'] == 0).sum())} of {len(ended)} "
    text += "rows solved none"
  else:
    is_best = ended["mean"].eq(best["mean"])
    if is_best.all():
      return (
        f"No row has the best {best['metric']} on the {best['split']} split: all rows "
        f"have {number(best['mean'])}."
      )
    names = enumeration(list(ended[is_best]["name"]))
    text = (
      f"{names} {'have' if is_best.sum() > 1 else 'has'} the best {best['metric']} on "
      f"the {best['split']} split, {number(best['mean'])}"
    )
  return f"{so_far}{text}{_difference_sentence(ended)}"


def _solved_sentence(ended: pd.DataFrame) -> str:
  """The rows with the highest share of solved seeds: '`a` solved 8 of 8 seeds, …'."""
  complete = ended[ended["is_complete"]]
  rows = ended if complete.empty else complete
  best = rows.iloc[0]
  shares = rows["solved"] / rows["trials"]
  parts = []
  for trials, group in rows[shares == shares.iloc[0]].groupby(
    "trials", sort=False
  ):
    names = enumeration(list(group["name"]))
    parts.append(f"{names} solved {group['solved'].iloc[0]:.0f} of {trials}")
  parts[0] += " seeds"
  return (
    f"{enumeration(parts, len(parts), '{}')} ({best['metric']} of "
    f"{best['solved_at']:g} or more on the {best['split']} split)"
  )


def _difference_sentence(ended: pd.DataFrame) -> str:
  """The end of the sentence: which rows differ from the first one or the reference."""
  tested = ended[ended["p"].notna()]
  if tested.empty and not ended["against"].any():
    return "; there are too few seeds for a test."
  if tested.empty:
    return "; no difference varies over three common seeds, so none is tested."
  against = f"`{tested['against'].iloc[0]}`"
  differ = tested[~tested["is_tied"]]
  count = {len(tested): "All", 0: "None"}.get(len(differ), len(differ))
  rows = f"{count} of the {len(tested)} other rows "
  rows += "differs" if len(differ) == 1 else "differ"
  if len(tested) == 1:
    rows = "The other row " + ("does not differ" if differ.empty else "differs")
  text = f". {rows} significantly from {against} (5 %"
  if differ.empty:
    return f"{text})."
  smallest = differ.loc[differ["difference"].abs().idxmin()]
  return (
    f"{text}); the smallest difference is that of `{smallest['name']}`, "
    f"{difference(smallest)}."
  )


def difference(row: Any) -> str:
  """The difference of a row with its interval: '+0.031 [+0.012, +0.050]'."""
  names = ("difference", "difference_low", "difference_high")
  value, low, high = (f"{row[name]:+.3f}" for name in names)
  return (
    value if math.isnan(row["difference_low"]) else f"{value} [{low}, {high}]"
  )


def number(value: float) -> str:
  """Formats a number for a reader, usually with three decimals."""
  if not math.isfinite(value):
    return "–"
  size = abs(value)
  if size >= 1000:
    return f"{value:,.0f}"
  if 0 < size < 0.01 or size >= 10:
    return f"{value:.4g}" if size < 0.01 else f"{value:.1f}"
  return f"{value:.3f}"


def enumeration(
  names: Sequence[str], limit: int = 4, form: str = "`{}`"
) -> str:
  """Lists names, '`a`, `b` and `c`'; of more than `limit`, counts the rest."""
  texts = [form.format(name) for name in names]
  if len(texts) > limit:
    texts = [*texts[: limit - 1], f"{len(texts) - limit + 1} other rows"]
  return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
