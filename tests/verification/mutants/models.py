"""Faults of models, decoding and published weights."""

from tests.verification.mutants.mutant import Mutant, files

_MODELS = files("tests/models")
_DECODING = files("tests/models", "decoding")
_PUBLISHED = "tests/models/published"

MUTANTS = (
  Mutant(
    "models/block.py",
    'functions[name](norm(x) if kind in ("pre", "sandwich") else x)',
    'functions[name](norm(x) if kind == "pre" else x)',
    _PUBLISHED,
    "norm 'sandwich' does not norm what a layer reads",
  ),
  Mutant(
    "models/block.py",
    "return sum((residual(name, x) for name in self.sublayers), start=x)",
    "return sum(added(name, x) for name in self.sublayers)",
    _PUBLISHED,
    "parallel sub-layers lose the residual",
  ),
  Mutant(
    "models/block.py",
    "x, memory, deterministic=deterministic, mask=memory_mask",
    "x, memory, deterministic=deterministic, mask=None",
    _MODELS,
    "cross-attention sees padding of the source",
  ),
  Mutant(
    "models/block.py",
    "        out = norm(out)\n      return self.dropout(out, deterministic=deterministic)",
    "        out = norm(self.dropout(out, deterministic=deterministic))\n      return out",
    _MODELS,
    "an output is normed after dropout",
  ),
  Mutant(
    "models/block.py",
    "scale_by(out, new)",
    "out",
    ("tests/models/published/test_plain.py",),
    "the outputs of sub-layers are not scaled",
  ),
  Mutant(
    "models/transformer.py",
    "counted = jnp.cumsum(inputs_mask, axis=1) * inputs_mask - 1",
    "counted = positions",
    ("tests/models/published/test_plain.py",),
    "masked inputs are counted as positions",
  ),
  Mutant(
    "models/transformer.py",
    "x = table(ids) * scale",
    "x = table(ids)",
    _MODELS,
    "embeddings of ids are not scaled",
  ),
  Mutant(
    "models/transformer.py",
    "x = self._cached(inputs[:, None], index[:, None])",
    "x = self._cached(inputs[:, None], index[:, None] + 1)",
    _MODELS,
    "decoding is a position ahead",
  ),
  Mutant(
    "models/short_convolution.py",
    "shifted = padded[:, WIDTH - 1 - back :][:, :length]",
    "shifted = jnp.roll(x, back, axis=1)",
    _MODELS,
    "the first positions of a short convolution see the last ones",
  ),
  Mutant(
    "projects/vision/pyramid.py",
    "          deterministic=deterministic,\n          **call,",
    "          **call,",
    "projects/vision/tests/test_pyramid.py",
    "no layer of a Swin drops anything",
  ),
  # Decoding.
  Mutant(
    "models/beam_search.py",
    "return ((5.0 + length) / 6.0) ** length_penalty",
    "return ((4.0 + length) / 6.0) ** length_penalty",
    _DECODING,
    "another length penalty",
  ),
  Mutant(
    "models/beam_search.py",
    "source_beams = (first_beam + parents).reshape(-1)",
    "source_beams = (0 * first_beam + parents).reshape(-1)",
    _DECODING,
    "beams go on with the cache of the first row",
  ),
  Mutant(
    "models/decoding.py",
    "largest, ids = jax.lax.top_k(logits, top_k)",
    "largest, ids = jax.lax.top_k(logits, max(top_k - 1, 1))",
    _DECODING,
    "sampling leaves out the last of the likeliest",
  ),
  Mutant(
    "models/beam_search.py",
    "within_reach = scores[:, 0] / penalty(max_length)",
    "within_reach = scores[:, 0] / penalty(state.step + 1)",
    _DECODING,
    "a row of beams ends early",
  ),
  Mutant(
    "models/decoding.py",
    "key = jax.random.fold_in(rng, step)",
    "key = jax.random.fold_in(rng, step // 2)",
    _DECODING,
    "a sampling key is used twice",
  ),
  # Published weights.
  Mutant(
    "models/published/roberta.py",
    '*family.linear("lm_head.dense", "head/transform"),',
    'Row("lm_head.dense.weight", ("params/head/transform/kernel",)),\n'
    '    Row("lm_head.dense.bias", ("params/head/transform/bias",)),',
    _PUBLISHED,
    "the head of RoBERTa is not transposed",
  ),
  Mutant(
    "models/published/t5.py",
    "logit_scale=features**-0.5 if scales else 1.0",
    "logit_scale=features**-0.5 if tied else 1.0",
    _PUBLISHED,
    "T5 scales what its head reads where the head is tied",
  ),
  Mutant(
    "models/multi_head_attention.py",
    'key = self._rotate_last(self._normalize("key", key), positions)',
    'key = self._normalize("key", self._rotate_last(key, positions))',
    _PUBLISHED,
    "keys are normed after they are turned",
  ),
  Mutant(
    "models/published/rotary.py",
    '"rotary_theta": family.number({"rope_theta": theta}, "rope_theta", 0.0),',
    '"rotary_theta": 10000.0,',
    _PUBLISHED,
    "rope_theta is read and ignored",
  ),
  Mutant(
    "models/published/llama.py",
    '"norm_epsilon": lambda: family.number(theirs, "rms_norm_eps", 1e-6),',
    '"norm_epsilon": lambda: 0.0 * family.number(theirs, "rms_norm_eps", 1.0) + 1e-6,',
    _PUBLISHED,
    "rms_norm_eps is read and ignored",
  ),
  Mutant(
    "models/published/t5.py",
    "family.TRANSPOSED",
    "family.SAME",
    _PUBLISHED,
    "square matrices are not transposed",
  ),
  Mutant(
    "models/published/weights.py",
    "if not (integers or np.isfinite(array).all()):",
    "if not (integers or np.isfinite(array).any()):",
    _PUBLISHED,
    "a tensor with NaN in it is taken",
  ),
  Mutant(
    "models/published/files.py",
    "if places.get(name) != shard:",
    "if name not in places:",
    _PUBLISHED,
    "a tensor is taken from a file that the index does not name for it",
  ),
  Mutant(
    "models/published/keys.py",
    "known = self.read | {*without_effect, *WITHOUT_EFFECT}",
    "known = {*self._content}",
    _PUBLISHED,
    "a key of config.json that nothing reads is accepted",
  ),
)
