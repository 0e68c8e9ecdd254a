"""Every published decoder can be given another mechanism, or says why not."""

import json
import shutil

import chex
import jax
import numpy as np
import pytest

import models
from models.published import load
from projects.swap import source, substitution, variant
from projects.swap.settings import Settings
from projects.swap.tests import swap_cases as cases
from tests.models.published.test_equality import usual

ATTENTION = "sliding_window:window=4,gated_delta"
NO_VALUES = "the model's mechanism computes its own values"
REFUSED = ("mamba", "falcon_mamba", "recurrent_gemma", "deepseek_v4")


def decoders():
  """The folders of causal language models, but those of projects."""
  endings = "ForCausalLM", "LMHeadModel"
  return [
    name
    for name, folder in cases.FOLDERS.items()
    if "projects" not in folder.parts
    and json.loads((folder / "config.json").read_text())["architectures"][
      0
    ].endswith(endings)
  ]


@pytest.mark.parametrize(
  "case",
  usual(
    decoders(),
    *("cohere2", "deepseek_v3", "falcon_h1", "gpt_oss", "kimi_linear"),
    *("mamba", "nemotron_h", "qwen3_5_text"),
  ),
)
def test_a_decoder_with_other_mechanisms(case, tmp_path):
  """It is traced, not computed; its tensors have the names of the folder's."""
  folder = tmp_path / case
  shutil.copytree(cases.FOLDERS[case], folder)
  cases.write_tokenizer(folder / "tokenizer.json", case, words=20)
  cases.write_text(tmp_path / "input.txt")
  read = {"weights": str(folder), "text": str(tmp_path / "input.txt")}
  asked = Settings(**read, attention=ATTENTION, context=12, batches=1)
  model = source.read(asked)
  paths = [module.path for module in model.modules]
  config, batch = model.description.config, model.task.train_batch(0)
  assert paths == [
    f"decoder_{i}/self_attention"
    for i, layer in enumerate(config.decoder_configs)
    if layer.slot.self_attention
  ]
  theirs = {*model.opened.tensors}
  for choice in asked.choices(model.context):
    description = variant.describe(model, choice.config, model.modules)
    swapped = load.make_model(description)
    shapes = jax.eval_shape(
      lambda swapped=swapped: models.initialize(
        swapped, jax.random.key(0), swapped.example()
      )
    )
    variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    mechanisms = substitution.extract(variables, paths)

    def logits(mechanisms, config=choice.config):
      everywhere = dict.fromkeys(mechanisms, np.array(True))
      options = batch, config.build(), mechanisms, everywhere
      return substitution.logits(model.model, model.variables, *options)

    if case in REFUSED:
      with pytest.raises(ValueError, match=NO_VALUES):
        jax.eval_shape(logits, mechanisms)
      continue
    out = jax.eval_shape(logits, mechanisms)
    assert out == jax.eval_shape(
      lambda variables, swapped=swapped: models.forward(
        swapped, variables, batch
      ),
      variables,
    )
    written = tmp_path / choice.config.name
    variant.save(model, swapped, variables, written)
    read = load.open_folder(written)
    assert read.description.config.attentions == description.config.attentions
    assert {*read.kept} == {*model.opened.kept}
    own = {x for x in read.tensors if not x.startswith("attention_lab/")}
    assert own <= theirs
    # Only variables of the mechanisms that are replaced are not there.
    mixers = ("self_attn", "linear_attn", "mixer", "mlstm", "attention")
    assert all(any(part in name for part in mixers) for name in theirs - own)
    again = models.load_pretrained(written).variables
    chex.assert_trees_all_equal_shapes_and_dtypes(again, variables)
