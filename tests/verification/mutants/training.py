"""Faults of training, tasks and comparisons."""

from tests.verification.mutants.mutant import Mutant, files

_STEPS = files(
  *("tests/training", "losses", "step", "optimizer", "metrics", "parallel"),
  *("mesh", "ema"),
)
_RUNS = files(
  *("tests/training", "checkpoint", "workdir", "metrics", "data", "loop"),
  *("experiment", "best"),
)
_STATISTICS = files("tests/comparison", "statistics", "summary", "choose")
_TASKS = files("tests/tasks")

MUTANTS = (
  # A step.
  Mutant(
    "training/step.py",
    "return objective, nats, jnp.sum(weights)",
    "return objective, nats, jnp.float32(weights.size)",
    _STEPS,
    "the loss is divided by padding, too",
  ),
  Mutant(
    "training/step.py",
    "uniform = -jnp.sum(weights * jnp.mean(log_probs, axis=-1))",
    "uniform = -jnp.sum(jnp.mean(log_probs, axis=-1))",
    _STEPS,
    "label smoothing reads padding",
  ),
  Mutant(
    "training/step.py",
    "totals = jax.tree.map(jnp.add, totals, (gradient, sums))",
    "totals = (jax.tree.map(jnp.add, totals[0], gradient), sums)",
    _STEPS,
    "accumulated gradients are divided by the last count",
  ),
  Mutant(
    "training/step.py",
    "gradient, sums = jax.lax.psum((gradient, sums), axis_name)",
    "sums = jax.lax.psum(sums, axis_name)",
    _STEPS,
    "pmap does not add the gradients of devices",
  ),
  Mutant(
    "training/step.py",
    "key = jax.random.fold_in(jax.random.key(state.seed), state.step)",
    "key = jax.random.fold_in(jax.random.key(state.seed), 0)",
    _STEPS,
    "every step draws the same dropout",
  ),
  Mutant(
    "training/step.py",
    "finite = jnp.isfinite(sums[0]) & jnp.isfinite(grad_norm)",
    "finite = jnp.isfinite(sums[0])",
    _STEPS,
    "a gradient that is not finite is applied",
  ),
  Mutant(
    "training/optimizer.py",
    "optax.chain(optax.clip_by_global_norm(config.clip_norm), update)",
    "optax.chain(update, optax.clip_by_global_norm(config.clip_norm))",
    _STEPS,
    "updates are clipped in place of gradients",
  ),
  Mutant(
    "training/optimizer.py",
    "return optax.join_schedules([ramp, schedule], [warmup])",
    "return optax.join_schedules([ramp, schedule], [warmup + 1])",
    _STEPS,
    "the schedule begins one step late",
  ),
  Mutant(
    "training/optimizer.py",
    "not str(path[-1].key).endswith(_NOT_DECAYED), params",
    'str(path[-1].key) != "scale", params',
    _STEPS,
    "biases decay",
  ),
  Mutant(
    "training/devices/mesh.py",
    "if name is not None and shape[axis] % sizes[name] == 0:",
    "if name is not None and shape[axis] < sizes[name]:",
    _STEPS,
    "mesh.tensor splits nothing",
  ),
  Mutant(
    "training/step.py",
    "rate = 1 - config.optimizer.ema_decay",
    "rate = config.optimizer.ema_decay",
    _STEPS,
    "a mean of parameters forgets what it is to keep",
  ),
  # A run.
  Mutant(
    "training/best.py",
    "value < other if is_lower_better(self._metric) else value > other",
    "value > other",
    _RUNS,
    "the highest loss is the best",
  ),
  Mutant(
    "training/best.py",
    "has_both and not self._is_better(threshold, value)",
    "has_both and self._is_better(value, threshold)",
    _RUNS,
    "a run goes on at its threshold",
  ),
  Mutant(
    "training/loop.py",
    'best = BestEvaluation(config, record.get("best", {}))',
    "best = BestEvaluation(config, {})",
    _RUNS,
    "a run that goes on counts evaluations anew",
  ),
  Mutant(
    "training/evaluate.py",
    "totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair)",
    "totals[name] = np.asarray(pair)",
    files("tests/training", "generated_tasks"),
    "a held-out metric is that of the last batch",
  ),
  Mutant(
    "training/checkpoint.py",
    "if saved.get(name) != restored_digests.get(name):",
    "if saved.keys() != restored_digests.keys():",
    _RUNS,
    "digests of a checkpoint are not compared",
  ),
  Mutant(
    "training/checkpoint.py",
    "mixed = _mix(_mix(places.astype(np.uint64) + np.uint64(1)) + values)",
    "mixed = _mix(_mix(places.astype(np.uint64) * np.uint64(0)) + values)",
    _RUNS,
    "a digest is that of numbers in any order",
  ),
  Mutant(
    "training/loop.py",
    "contextlib.closing(prefetch(load, first, last)) as batches,",
    "contextlib.closing(\n"
    "      prefetch(lambda i: load(i - (i == first > 0)), first, last)\n"
    "    ) as batches,",
    _RUNS,
    "a run that goes on trains a batch again",
  ),
  Mutant(
    "training/metrics.py",
    'if record["step"] <= step]',
    'if record["step"] < step]',
    _RUNS,
    "a run that goes on loses the line of its checkpoint",
  ),
  Mutant(
    "training/ownership.py",
    "fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB * (not wait))",
    "fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB * (not wait))",
    _RUNS,
    "two processes write in one folder",
  ),
  Mutant(
    "tasks/files.py",
    "if digests.get(name) != began.get(name):",
    "if name not in digests:",
    (*_RUNS, *_TASKS),
    "a run goes on with other data",
  ),
  # Tasks.
  Mutant(
    "tasks/text/stored.py",
    "yield block[max(start - place, 0) : max(stop - place, 0)]",
    "yield block[max(start - place, 0) :]",
    _TASKS,
    "a text on disk trains on a part of what is held out",
  ),
  Mutant(
    "tasks/copy.py",
    "weights = (positions >= starts[:, None]) & (targets != PAD)",
    "weights = positions >= starts[:, None]",
    _TASKS,
    "padding counts in the metric",
  ),
  Mutant(
    "tasks/copy.py",
    "ids = symbols.astype(np.int32) + FIRST_SYMBOL",
    "ids = symbols.astype(np.int32) + SEP",
    _TASKS,
    "the first symbol is the separator",
  ),
  Mutant(
    "tasks/copy.py",
    "remainder = np.uint64(1) + raw[:, 1] % (size - np.uint64(1))",
    "remainder = raw[:, 1] % size",
    _TASKS,
    "held-out sequences are trained",
  ),
  Mutant(
    "tasks/base.py",
    "for start in range(0, count, batch_size):",
    "for start in range(0, count - batch_size + 1, batch_size):",
    _TASKS,
    "the last held-out examples are left out",
  ),
  Mutant(
    "tasks/base.py",
    "order = np.random.default_rng((seed, int(epoch)))",
    "order = np.random.default_rng((seed, 0))",
    _TASKS,
    "every epoch has the same order",
  ),
  # Comparisons.
  Mutant(
    "comparison/analysis/statistics.py",
    "half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1) * stats.sem(values))",
    "half = float(stats.t.ppf((1 + LEVEL) / 2, count) * stats.sem(values))",
    _STATISTICS,
    "an interval has one degree of freedom too many",
  ),
  Mutant(
    "comparison/analysis/statistics.py",
    "_paired_t_test(values[j] - values[i])",
    "_paired(np.sort(values[j]) - np.sort(values[i]))",
    _STATISTICS,
    "values are paired by their size",
  ),
  Mutant(
    "comparison/analysis/statistics.py",
    "return ours - theirs",
    "return theirs - ours",
    _STATISTICS,
    "a difference has the other sign",
  ),
  Mutant(
    "comparison/analysis/summary.py",
    'choosing = group[group["choosing"]] if group["choosing"].any() else group',
    'choosing = group[~group["choosing"]]',
    _STATISTICS,
    "a row shows the point that its reported seeds prefer",
  ),
  Mutant(
    "comparison/config.py",
    "[FIRST_CHOOSING_SEED + i for i in range(self.halving.seeds)]",
    "[*range(self.halving.seeds)]",
    _STATISTICS,
    "the seeds that are reported choose",
  ),
  Mutant(
    "comparison/choose.py",
    "half = math.ceil(len(ranked) / 2)",
    "half = len(ranked) // 2",
    _STATISTICS,
    "of three points one goes on",
  ),
  Mutant(
    "comparison/choose.py",
    "ranked.append((Standing(unsolved, mean), point))",
    "ranked.append((Standing(0, mean), point))",
    _STATISTICS,
    "a point that fewer seeds solve is chosen by its loss",
  ),
  Mutant(
    "comparison/analysis/statistics.py",
    "degrees = (rows - 1) * (seeds - 1)",
    "degrees = rows * (seeds - 1)",
    _STATISTICS,
    "Tukey's test ignores the degrees of freedom of the seeds",
  ),
  Mutant(
    "comparison/analysis/summary.py",
    'older = ended["accuracy"].notna() & ended[criterion.LAST].isna()',
    'older = ended["accuracy"].isna()',
    _STATISTICS,
    "older rows have no value where newer ones have a last position",
  ),
  Mutant(
    "tasks/base.py",
    "last = counted.shape[-1] - 1 - jnp.argmax(counted[:, ::-1], axis=-1)",
    "last = jnp.argmax(counted, axis=-1)",
    _TASKS,
    "the first position is taken for the last",
  ),
)
