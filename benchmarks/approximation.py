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
import json
import math
from pathlib import Path
import statistics
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from absl import flags

from comparison import style as style_lib
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
    source: what its paper says of the rate, and where.
    law: slope of log error against log option that its paper has; None where it
      has none.
    options: others of its factory.
    is_drawn: whether what it draws matters.
    is_below_length: whether the option has to be less than the length.
  """

  mechanism: str
  option: str
  values: tuple[int, ...]
  source: str
  law: float | None = None
  options: Mapping[str, Any] = MappingProxyType({})
  is_drawn: bool = False
  is_below_length: bool = False


SWEEPS = (
  Sweep(
    "performer",
    "num_features",
    (16, 32, 64, 128, 256, 512, 1024),
    "variance ∝ 1/M of a mean of M features (arXiv:2009.14794)",
    law=-0.5,
    is_drawn=True,
  ),
  Sweep(
    "linformer",
    "rank",
    (8, 16, 32, 64, 128),
    "rank ∝ 1/ε² (arXiv:2006.04768, theorem 2)",
    law=-0.5,
    is_drawn=True,
    is_below_length=True,
  ),
  Sweep(
    "nystrom",
    "num_landmarks",
    (4, 8, 16, 32, 64, 128),
    "no rate (arXiv:2102.03902)",
    is_below_length=True,
  ),
  Sweep(
    "lsh",
    "num_rounds",
    (1, 2, 4, 8, 16),
    "no rate (arXiv:2001.04451)",
    options={"chunk_size": 16},
    is_drawn=True,
  ),
  Sweep(
    "sliding_window",
    "window",
    (4, 8, 16, 32, 64, 128),
    "no rate (arXiv:2004.05150)",
    is_below_length=True,
  ),
)

Call = tuple[Any, Any, Any, Mapping[str, Any]]
"""Query, key, value and options of one attention."""

Point = Mapping[str, Any]
"""'mechanism', 'option', 'value', and 'errors', one for each draw."""

Points = Mapping[str, Sequence[Sequence[Point]]]
"""Kind of arrays, such as 'random' -> the points of every sweep."""


def points(
  sweep: Sweep, calls: Sequence[Call], num_draws: int = _DRAWS
) -> list[Point]:
  """Errors of a mechanism, a value of its option after another.

  Args:
    sweep: the mechanism.
    calls: of attentions of one shape, at least one.
    num_draws: of what the mechanism draws.

  Returns:
    A point for each value.
  """
  import jax

  from attention import ATTENTIONS, Dims

  query, key = calls[0][:2]
  length = key.shape[1]
  dims = Dims(query.shape[2], key.shape[2], query.shape[3], length)
  measurements: list[Point] = []
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
    measurements.append(
      {
        "mechanism": sweep.mechanism,
        "option": sweep.option,
        "value": value,
        "errors": errors,
      }
    )
  return measurements


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
    reference = exact(query, key, value, **call)
    return jnp.stack([jnp.sum((out - reference) ** 2), jnp.sum(reference**2)])

  def error(variables):
    sums = [squares(variables, *arrays, call) for *arrays, call in calls]
    deviation, size = jnp.stack(sums).sum(axis=0)
    return math.sqrt(deviation / size)

  return error


def slope(measurements: Sequence[Point]) -> float | None:
  """Of log error against log value, by least squares over means that are not 0."""
  pairs = [
    (math.log(point["value"]), math.log(statistics.fmean(point["errors"])))
    for point in measurements
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
  calls: list[Call] = []
  for shape, subkeys in zip(shapes, keys, strict=True):
    query, key, value = (jax.random.normal(k, shape) for k in subkeys)
    calls.append((size * query, size * key, value, {}))
  return calls


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
  calls: list[Call] = []

  def observer(attention, query, key, value, out, **call):
    del attention, out
    options = {k: v for k, v in call.items() if k == "mask" and v is not None}
    calls.append((query, key, value, options))

  models.observe_attention(cast(Any, run.model), variables, rows, observer)
  return calls


def markdown(points_by_kind: Points) -> str:
  """Errors with their 95 % intervals, and slopes, as two tables."""
  from benchmarks.scaling_tables import table

  kinds = list(points_by_kind)
  errors = [
    ["mechanism", "option", *kinds],
    ["---", "---", *["--:"] * len(kinds)],
  ]
  slopes = [
    ["mechanism", "paper", "against", *kinds, "paper's slope"],
    ["---", "---", "---", *["--:"] * (len(kinds) + 1)],
  ]
  for number, sweep in enumerate(SWEEPS):
    sweeps = [points_by_kind[kind][number] for kind in kinds]
    for row in zip(*sweeps, strict=True):
      name = f"{sweep.option} = {row[0]['value']}"
      cells = [_interval(point["errors"]) for point in row]
      errors.append([f"`{sweep.mechanism}`", name, *cells])
    fitted = [*map(slope, sweeps), sweep.law]
    cells = ["–" if x is None else f"{x:.2f}" for x in fitted]
    slopes.append([f"`{sweep.mechanism}`", sweep.source, sweep.option, *cells])
  return f"{table(errors)}\n\n{table(slopes)}"


def _interval(errors: Sequence[float]) -> str:
  """`mean ± half` of Student's 95 % interval; the mean alone of one error."""
  from scipy import stats

  mean = f"{statistics.fmean(errors):.3g}"
  if len(errors) < 2:
    return mean
  error = statistics.stdev(errors) / math.sqrt(len(errors))
  return f"{mean} ± {stats.t.ppf(0.975, len(errors) - 1) * error:.2g}"


CAPTION = (
  "Relative error of the outputs against features, rank, landmarks, rounds and "
  "width of the window. Bands are five draws; the dotted grey line falls as "
  "1/√x."
)


def draw(points_by_kind: Points, stem: Path) -> None:
  """Writes `stem`.png and `stem`.svg, a panel for each kind of arrays."""
  from matplotlib import pyplot

  count = len(points_by_kind)
  figure, axes = pyplot.subplots(
    1, count, figsize=(3.9 * count, 3.4), layout="constrained", squeeze=False
  )
  for panel, (kind, sweeps) in zip(
    axes[0], points_by_kind.items(), strict=True
  ):
    _draw_panel(panel, sweeps)
    panel.set_title(f"{kind} queries and keys")
  figure.legend(
    *axes[0, 0].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=len(SWEEPS),
  )
  for kind in ("png", "svg"):
    figure.savefig(stem.with_suffix(f".{kind}"), dpi=150)
  pyplot.close(figure)


def _draw_panel(axes: Any, sweeps: Sequence[Sequence[Point]]) -> None:
  styles = style_lib.styles([])
  for points in sweeps:
    # What is exact has no place on a logarithmic axis.
    curve = [point for point in points if min(point["errors"]) > 1e-4]
    values = [point["value"] for point in curve]
    errors = [point["errors"] for point in curve]
    name = f"{points[0]['mechanism']}, {points[0]['option']}"
    style = styles[points[0]["mechanism"]]
    axes.plot(
      values,
      [*map(statistics.fmean, errors)],
      color=style.color,
      linestyle=style.linestyle,
      marker=style.marker,
      label=name,
    )
    axes.fill_between(
      values,
      [*map(min, errors)],
      [*map(max, errors)],
      color=style.color,
      alpha=0.1,
    )
  axes.set(
    xscale="log",
    yscale="log",
    xlabel="features, rank, landmarks, rounds, width",
    ylabel="relative error",
  )
  axes.autoscale(False)
  (left, right), high = axes.get_xlim(), axes.get_ylim()[1]
  axes.plot(
    [left, right], [high, high * math.sqrt(left / right)], ":", color="grey"
  )


def main() -> None:
  """Measures, prints and writes."""
  points_by_kind = {}
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
  for kind, kind_calls in calls.items():
    points_by_kind[kind] = []
    for sweep in SWEEPS:
      points_by_kind[kind].append(points(sweep, kind_calls))
      print(f"{kind}: {sweep.mechanism}", flush=True)
  text = markdown(points_by_kind)
  print(text)
  if _OUT.value is not None:
    folder = Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
      kind: [point for sweep in sweeps for point in sweep]
      for kind, sweeps in points_by_kind.items()
    }
    (folder / "approximation.json").write_text(json.dumps(content, indent=1))
    body = f"{text}\n\n![{CAPTION}](approximation.svg)\n"
    (folder / "approximation.md").write_text(body, "utf-8")
    draw(points_by_kind, folder / "approximation")
    print(folder)


if __name__ == "__main__":
  entry.run(main)
