r"""How fast approximations of softmax attention become exact.

    python -m benchmarks.approximation --out=/tmp/approximation
    python -m benchmarks.approximation --workdir=RUN --out=/tmp/approximation

The error ‖out − exact‖ / ‖exact‖ against the one number of each mechanism that buys
exactness: Performer's features, Nyström's landmarks, Linformer's rank, LSH's rounds,
the window's width. On random arrays from N(0, 1), on the same with queries and keys
half as large, so that logits are a quarter, and with --workdir on those of every
layer of a trained encoder with dense attention, which is where it counts. Norms are over layers, rows, heads and positions. What a mechanism draws is
drawn five times. Prints the tables of approximation.md and writes them, the points
(approximation.json) and a figure to --out.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import json
import math
from pathlib import Path
import statistics
from typing import Any, NamedTuple, cast

from absl import flags

from settings.errors import ConfigError
from training import entry

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "run of train.py: an encoder with dense attention"
)
_OUT = flags.DEFINE_string("out", None, "folder that is written")
_LENGTH = flags.DEFINE_integer(
  "length", 256, "T = S of random arrays without --workdir", lower_bound=32
)
_ROWS = 4
_DRAWS = 5


class Sweep(NamedTuple):
  """One mechanism against the number that buys exactness.

  Attributes:
    mechanism: key of `ATTENTIONS`.
    option: of its factory.
    values: of the option.
    options: others of its factory.
    is_drawn: whether what it draws matters.
    is_below_length: whether the option has to be less than the length.
    law: slope of log error against log option that its paper has; None where it
      has none.
    source: where that is said.
  """

  mechanism: str
  option: str
  values: tuple[int, ...]
  options: Mapping[str, Any]
  is_drawn: bool
  is_below_length: bool
  law: float | None
  source: str


SWEEPS = (
  Sweep(
    "performer",
    "num_features",
    (16, 32, 64, 128, 256, 512, 1024),
    {},
    True,
    False,
    -0.5,
    "variance ∝ 1/M of a mean of M features (arXiv:2009.14794)",
  ),
  Sweep(
    "linformer",
    "rank",
    (8, 16, 32, 64, 128),
    {},
    True,
    True,
    -0.5,
    "rank ∝ 1/ε² (arXiv:2006.04768, theorem 2)",
  ),
  Sweep(
    "nystrom",
    "num_landmarks",
    (4, 8, 16, 32, 64, 128),
    {},
    False,
    True,
    None,
    "no rate (arXiv:2102.03902)",
  ),
  Sweep(
    "lsh",
    "num_rounds",
    (1, 2, 4, 8, 16),
    {"chunk_size": 16},
    True,
    False,
    None,
    "no rate (arXiv:2001.04451)",
  ),
  Sweep(
    "sliding_window",
    "window",
    (4, 8, 16, 32, 64, 128),
    {},
    False,
    True,
    None,
    "no rate (arXiv:2004.05150)",
  ),
)

Call = tuple[Any, Any, Any, Mapping[str, Any]]
"""Query, key, value and options of one attention."""


def points(
  sweep: Sweep, calls: Sequence[Call], num_draws: int = _DRAWS
) -> list[dict[str, Any]]:
  """Errors of a mechanism, a value of its option after another.

  Args:
    sweep: the mechanism.
    calls: of attentions of one shape, at least one.
    num_draws: of what the mechanism draws.

  Returns:
    'mechanism', 'option', 'value', and 'errors', one for each draw.
  """
  import jax

  from attention import ATTENTIONS, Dims

  query, key = calls[0][:2]
  length = key.shape[1]
  dims = Dims(query.shape[2], key.shape[2], query.shape[3], length)
  found = []
  for value in sweep.values:
    if sweep.is_below_length and value >= length:
      continue
    record = ATTENTIONS[sweep.mechanism](
      **{sweep.option: value}, **sweep.options
    )
    error = relative_error(record, calls)
    errors = [
      error(record.init(jax.random.key(draw), dims))
      for draw in range(num_draws if sweep.is_drawn else 1)
    ]
    found.append(
      {
        "mechanism": sweep.mechanism,
        "option": sweep.option,
        "value": value,
        "errors": errors,
      }
    )
  return found


def relative_error(
  record: Any, calls: Sequence[Call]
) -> Callable[[Any], float]:
  """‖out − exact‖ / ‖exact‖ over several attentions, of a mechanism's variables."""
  import jax
  import jax.numpy as jnp

  from comparison import approximation

  exact = approximation.exact(record)
  is_shared = record.approximates == "shared_qk"

  @jax.jit
  def squares(variables, query, key, value, call):
    key = None if is_shared else key
    out = record.apply(variables, query, key, value, **call)
    there = exact(query, key, value, **call)
    return jnp.stack([jnp.sum((out - there) ** 2), jnp.sum(there**2)])

  def error(variables):
    of_calls = [squares(variables, *arrays, call) for *arrays, call in calls]
    deviation, size = jnp.stack(of_calls).sum(axis=0)
    return math.sqrt(deviation / size)

  return error


def slope(found: Sequence[Mapping[str, Any]]) -> float | None:
  """Of log error against log value, by least squares over means that are not 0."""
  pairs = [
    (math.log(point["value"]), math.log(statistics.fmean(point["errors"])))
    for point in found
    if statistics.fmean(point["errors"]) > 1e-6
  ]
  if len(pairs) < 2:
    return None
  return statistics.linear_regression(*zip(*pairs, strict=True)).slope


def random_calls(
  shapes: Sequence[tuple[int, ...]], size: float = 1.0
) -> list[Call]:
  """An attention for each shape: values from N(0, 1), queries and keys times size."""
  import jax

  keys = jax.random.split(jax.random.key(0), (len(shapes), 3))
  found: list[Call] = []
  for shape, of_three in zip(shapes, keys, strict=True):
    query, key, value = (jax.random.normal(k, shape) for k in of_three)
    found.append((size * query, size * key, value, {}))
  return found


def trained_calls(folder: Path) -> list[Call]:
  """What every layer of a trained encoder attends with, on held-out rows.

  Raises:
    ConfigError: there is no such run, or its model is not an encoder with dense
      attention alone.
  """
  import models
  from training import experiment, experiment_config, inference, workdir

  config = experiment_config.parse(workdir.read_config(folder), restore=True)
  slots = models.slots(config.model)
  if config.model.kind != "encoder" or slots != "dense":
    raise ConfigError(
      f"--workdir: expected an encoder with dense attention, got "
      f"model.kind={config.model.kind!r} with {slots}"
    )
  run = experiment.create(config, folder)
  variables = inference.restore_variables(run, folder)
  batch = next(iter(run.task.eval_batches(run.task.eval_splits[0])))
  rows = {name: array[:_ROWS] for name, array in batch.items()}
  found: list[Call] = []

  def observer(attention, query, key, value, out, **call):
    del attention, out
    kept = {k: v for k, v in call.items() if k == "mask" and v is not None}
    found.append((query, key, value, kept))

  models.observe_attention(cast(Any, run.model), variables, rows, observer)
  return found


def markdown(
  found: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
) -> str:
  """Errors and slopes as tables.

  Args:
    found: 'random' and 'trained' -> `points` of every sweep.
  """
  from reports import markdown as tables
  from reports import numbers

  rows = []
  for number, sweep in enumerate(SWEEPS):
    by_value: dict[int, dict[str, str]] = {}
    for kind, sweeps in found.items():
      for point in sweeps[number]:
        shown = numbers.short_interval(point["errors"])
        by_value.setdefault(point["value"], {})[kind] = shown
    for value, cells in by_value.items():
      name = f"`{sweep.mechanism}`"
      shown = [cells.get(kind, "–") for kind in found]
      rows.append([name, f"{sweep.option} = {value}", *shown])
  lines = tables.aligned(["mechanism", "option", *found], rows, 2)
  slopes = []
  for number, sweep in enumerate(SWEEPS):
    fitted = [slope(sweeps[number]) for sweeps in found.values()]
    shown = ["–" if x is None else f"{x:.2f}" for x in fitted]
    law = "–" if sweep.law is None else f"{sweep.law:.2f}"
    slopes.append(
      [f"`{sweep.mechanism}`", sweep.source, sweep.option, *shown, law]
    )
  header = ["mechanism", "paper", "against", *found, "paper's slope"]
  return "\n".join([*lines, "", *tables.aligned(header, slopes, 3)])


def figure(found: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> Any:
  """Errors against the options, a panel for each kind of arrays."""
  from reports import style
  from reports.figures import Figure

  styles = style.styles([sweep.mechanism for sweep in SWEEPS])
  panels: dict[str, Callable[..., Any]] = {
    kind: functools.partial(_panel, kind, sweeps, styles)
    for kind, sweeps in found.items()
  }
  caption = (
    "Relative error of the outputs against features, rank, landmarks, rounds and "
    "width of the window. Bands are five draws; the dotted grey line falls as "
    "1/√x."
  )
  return Figure("approximation", caption, panels, len(panels))


def _panel(kind, sweeps, styles, axes):
  from reports import axes as axes_lib
  from reports import labels
  from reports import style as style_lib
  from reports.labels import Label

  last, values, errors = [], [], []
  for of_sweep in sweeps:
    mechanism = of_sweep[0]["mechanism"]
    style = styles[mechanism]
    shown = [p for p in of_sweep if min(p["errors"]) > 1e-4]
    x = [point["value"] for point in shown]
    y = [statistics.fmean(point["errors"]) for point in shown]
    axes.plot(
      x,
      y,
      color=style.color,
      linestyle=style.dash,
      marker=style.marker,
      markersize=3.5,
    )
    low = [min(point["errors"]) for point in shown]
    high = [max(point["errors"]) for point in shown]
    axes.fill_between(x, low, high, color=style.color, alpha=0.1, linewidth=0)
    name = f"{mechanism}, {of_sweep[0]['option']}"
    last.append(Label(name, x[-1], y[-1], style.color))
    values += x
    errors += y
  axes_lib.against_length(axes, values, errors, "")
  left, right = min(values), max(values)
  low, high = axes.get_ylim()
  axes.plot(
    [left, right],
    [high, high * math.sqrt(left / right)],
    color=style_lib.MUTED,
    linewidth=0.8,
    linestyle=(0, (1, 3)),
    zorder=0,
  )
  axes.set_ylim(low, high)
  axes.set_title(f"{kind} queries and keys")
  axes.set_xlabel("features, rank, landmarks, rounds, width")
  axes.set_ylabel("relative error")
  return labels.ends(axes, last)


def main() -> None:
  """Measures, prints and writes."""
  found = {}
  trained = {}
  shapes = [(_ROWS, _LENGTH.value, 4, 32)] * 2
  if _WORKDIR.value is not None:
    trained = {"trained": trained_calls(Path(_WORKDIR.value))}
    shapes = [query.shape for query, *_ in trained["trained"]]
  calls = {
    "random": random_calls(shapes),
    "random, halved": random_calls(shapes, 0.5),
    **trained,
  }
  for kind, of_kind in calls.items():
    found[kind] = []
    for sweep in SWEEPS:
      found[kind].append(points(sweep, of_kind))
      print(f"{kind}: {sweep.mechanism}", flush=True)
  text = markdown(found)
  print(text)
  if _OUT.value is not None:
    from reports import figures

    folder = Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
      kind: [point for sweep in sweeps for point in sweep]
      for kind, sweeps in found.items()
    }
    (folder / "approximation.json").write_text(json.dumps(content, indent=1))
    drawn = figure(found)
    body = f"{text}\n\n![{drawn.caption}](approximation.svg)\n"
    (folder / "approximation.md").write_text(body, "utf-8")
    figures.save(folder, [drawn])
    print(folder)


if __name__ == "__main__":
  entry.run(main)
