"""Small published models with a text that they can read."""

import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from projects.swap import source
from projects.swap.settings import Settings
from tests.models.published.test_equality import FOLDERS

SPECIAL = {
  "gpt2": ["<|endoftext|>"],
  "mamba2": ["<|endoftext|>"],
  "qwen3_next": ["<|endoftext|>"],
  "deepseek_v3": ["<|endoftext|>"],
  "bert_masked": ["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
  "t5": ["<pad>", "</s>", *(f"<extra_id_{i}>" for i in range(20))],
}
_WORDS = 30


def write_text(path, count=1500):
  """Words of which the next often follows from the last two."""
  rng = np.random.default_rng(0)
  words = [0, 1]
  for _ in range(count):
    rule = (words[-1] * 7 + words[-2]) % _WORDS
    words.append(rule if rng.random() < 0.7 else int(rng.integers(_WORDS)))
  pathlib.Path(path).write_text(" ".join(f"w{word}" for word in words))


def write_tokenizer(path, case, words=_WORDS):
  """A tokenizer.json of one id a word, special tokens first."""
  special = SPECIAL.get(case, ["<|endoftext|>"])
  names = [*special, "[UNK]", *(f"w{i}" for i in range(words))]
  ids = {name: i for i, name in enumerate(names)}
  tokenizer = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
  tokenizer.pre_tokenizer = WhitespaceSplit()
  tokenizer.add_special_tokens(special)
  tokenizer.save(str(path))


def write_folder(case, path):
  """A copy of a small model, GPT-2 without its last layer, with a tokenizer."""
  shutil.copytree(FOLDERS[case], path)
  write_tokenizer(path / "tokenizer.json", case)
  if case == "gpt2":
    config = json.loads((path / "config.json").read_text()) | {"n_layer": 2}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if ".h.2." not in name}
    save_file(kept, path / "model.safetensors")


def settings(case, path, **options):
  """What asks for a swap in a small model; writes its folder and the text."""
  weights = path / case
  if not weights.exists():
    write_folder(case, weights)
  write_text(path / "input.txt")
  given = {"context": 20, "batches": 2, **options}
  return Settings(weights=str(weights), text=str(path / "input.txt"), **given)


def read(case, path, **options):
  """The settings and the model of a case."""
  asked = settings(case, path, **options)
  return asked, source.read(asked)
