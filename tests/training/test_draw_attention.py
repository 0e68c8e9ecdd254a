"""`python -m training.commands.draw_attention`: pictures of every layer, for any words."""

import functools
import runpy
import shutil
import types

from absl import flags
import numpy as np
import pytest

from attention import ATTENTIONS
import models
from models.attention_config import NEEDS
from settings.errors import ConfigError
import tasks
from tests import commands
from tests.attention.forms import RECURRENT
from tests.here import is_here
from tests.models import tiny
from tests.training import tiny as training_tiny
from training import experiment, experiment_config
from training.pictures import attention_maps
from training.pictures.example import make_example


def draw(*arguments):
  """Runs the command to its end: (exit code, output, error)."""
  return commands.run_module("training.commands.draw_attention", *arguments)


@pytest.fixture
def workdir(tmp_path):
  """A copy of a run, as pictures are written into its folder."""
  return shutil.copytree(commands.finished()[0], tmp_path / "run")


def test_a_picture_of_every_layer(workdir, tmp_path):
  """In the folder of the run, or in one of one's own; a target may be given."""
  own = tmp_path / "new" / "pictures"
  for folder, options in (
    (workdir / "attention", ()),
    (own, ("--target=3", f"--out={own}")),
  ):
    code, out, error = draw(f"--workdir={workdir}", "--text=1 2", *options)
    assert (code, error) == (0, "")
    paths = out.splitlines()
    if not options:
      assert paths.pop(0).startswith("output: ")
    names = ["encoder_1_self", "decoder_1_self", "decoder_1_cross"]
    expected = [folder / f"{n}_attention.png" for n in names]
    assert paths == [str(path) for path in expected]
    for path in expected:
      assert path.read_bytes().startswith(b"\x89PNG")


def test_faults_are_one_line(workdir, tmp_path):
  file = tmp_path / "file"
  file.touch()
  taken = tmp_path / "taken"
  (taken / "encoder_1_self_attention.png").mkdir(parents=True)
  bare = tmp_path / "bare"
  bare.mkdir()
  (bare / "config.json").write_text((workdir / "config.json").read_text())
  run = f"--workdir={workdir}"
  for arguments, message in (
    ([], "--workdir: missing"),
    ([run], "--text: expected the text that the model reads"),
    ([run, "--image=a.png"], "--image: this run reads no images"),
    ([run, "--text=1", "--query=1,2"], "--query: needs --image=FILE"),
    ([run, "--image=a", "--target=1"], "--target: needs --text=TEXT"),
    (["--texts=1"], "texts"),
    ([run, "--text=1", "--out=a.png"], "--out: expected a folder"),
    ([run, "--text=1", f"--out={file}/a"], f"--out: {file} is not a folder"),
    ([run, "--text=1", "--target=1", f"--out={taken}"], "--out: [Errno"),
    ([f"--workdir={tmp_path}", "--text=1"], "workdir: no run in"),
    ([f"--workdir={bare}", "--text=1"], "workdir: no checkpoint in"),
    ([run, "--text=1 2 3 0", f"--out={tmp_path}/new"], "text: expected 1 to"),
  ):
    code, out, error = draw(*arguments)
    assert (code, out) == (2, ""), arguments
    assert error.count("\n") == 1
    assert message in error
  assert not (tmp_path / "new").exists()


TASKS = {
  "encoder_decoder": {"name": "copy", "max_length": 7, "vocab_size": 8},
  "seq2seq": {"name": "copy", "max_length": 7, "vocab_size": 8},
  "encoder": {"name": "copy", "max_length": 8, "vocab_size": 8},
  "decoder": {"name": "induction", "length": 8},
  "copying decoder": {"name": "copy", "max_length": 7, "vocab_size": 8},
}

SLOTS = {
  "encoder_decoder": tuple(NEEDS),
  "encoder": ("encoder_attention",),
  "decoder": ("decoder_attention",),
}


@functools.cache
def untrained(kind, mechanism="dense"):
  """A small model that uses a mechanism wherever it can work."""
  model_kind = kind.rpartition(" ")[2]
  chosen = tiny.attention(mechanism)
  options = {"name": mechanism, **tiny.OPTIONS.get(mechanism, {})}
  if model_kind == "seq2seq":
    model = {"kind": kind, "num_layers": 1, "num_heads": 1, "features": 16}
    model |= {"cell": "gru", "decoder": "bahdanau", "cross_attention": options}
    mapping = {"num_steps": 1, "batch_size": 4, "task": TASKS[kind]}
    config = experiment_config.parse({**mapping, "model": model})
  else:
    supports = chosen.build().supports
    served = [s for s in SLOTS[model_kind] if NEEDS[s].keys() <= supports]
    model = dict.fromkeys(served, options)
    config = training_tiny.config(model_kind, TASKS[kind], model)
  run = experiment.create(config)
  return run, tiny.initialized(run.model)


def symbols(count):
  return " ".join(str(i) for i in range(count))


def drawn(kind, mechanism, text, target=None):
  """The maps, after a look at what was cut off them."""
  run, variables = untrained(kind, mechanism)
  example = make_example(run, variables, text, target)
  maps = attention_maps.named_maps(run.model, variables, run.task, example)
  whole = models.attention_maps(run.model, variables, example)
  for name, shown in maps.items():
    shape = (len(shown.query_labels), len(shown.key_labels))
    assert shown.weights.shape[1:] == shape
    assert "<pad>" not in shown.key_labels
    assert np.isfinite(shown.weights).all()
    [raw] = [w[0] for n, w in whole.items() if slot(n) == name]
    assert not np.asarray(raw)[:, : shape[0], shape[1] :].any()
  return maps


def slot(name):
  return name.replace("_0", "_1").replace("/", "_")


@pytest.mark.parametrize(
  "mechanism",
  [  # Of one that decodes and of one that cannot.
    name
    if name in ("lsh", "linformer")
    else pytest.param(name, marks=pytest.mark.thorough)
    for name in ATTENTIONS
  ],
)
def test_any_mechanism_at_any_length(mechanism):
  supports = tiny.attention(mechanism).build().supports
  for length in (1, 7):  # 7 is the most that the encoder reads.
    text = symbols(length)
    maps = drawn("encoder_decoder", mechanism, text, target="3")
    source = [*text.split(), "<eos>"]
    encoder, decoder, cross = maps.values()
    assert encoder.query_labels == encoder.key_labels == source
    assert decoder.query_labels == decoder.key_labels == ["<bos>", "3"]
    assert (cross.query_labels, cross.key_labels) == (["3", "<eos>"], source)
    assert (np.triu(decoder.weights, 1) == 0).all()
    if NEEDS["decoder_attention"].keys() <= supports:
      [alone] = drawn("decoder", mechanism, text).values()
      assert alone.query_labels == alone.key_labels == text.split()
      assert (np.triu(alone.weights, 1) == 0).all()
      # It has nothing else; rows of some sum to anything.
      if mechanism not in (*RECURRENT, "differential", "nsa", "stick_breaking"):
        assert (alone.weights[:, 0, 0] > 0.9).all()


@pytest.mark.skipif(not is_here("seq2seq"), reason="no projects/seq2seq")
@pytest.mark.parametrize(
  ("written", "message"),
  [
    (None, ""),
    ("a b", "output: a b\n"),
    (tasks.DataError("a.wav: none"), "--audio: a.wav: none"),
    (ConfigError("--text: none"), "--text: none"),
    (ValueError("query: none"), "--query: none"),
    (OSError("full"), "--out: full"),
  ],
)
def test_a_file_is_drawn_by_its_model(
  written, message, tmp_path, monkeypatch, capsys
):
  """The output comes before the path, and a fault names its flag."""

  def draw_input(path, run, variables, file, query):
    asked.append((path, run, variables, file, query))
    if isinstance(written, Exception):
      raise written
    return written

  asked, path = [], tmp_path / "out" / "attention.png"
  model = types.SimpleNamespace(input_file="audio", draw_input=draw_input)
  task = types.SimpleNamespace(read=None)
  run = types.SimpleNamespace(model=model, task=task)
  # Another command of this process may have defined a flag of the same name.
  for kind in ("DEFINE_string", "DEFINE_list"):
    flag = types.SimpleNamespace(value=["0", "1"])
    monkeypatch.setattr(flags, kind, lambda *unused, flag=flag, **more: flag)
  draw_file = runpy.run_module("training.commands.draw_attention")["_draw_file"]
  arguments = run, {}, "audio", "a.wav", path.parent
  if isinstance(written, Exception):
    with pytest.raises(ConfigError, match=f"^{message}$"):
      draw_file(*arguments)
  else:
    draw_file(*arguments)
    assert capsys.readouterr().out == f"{message}{path}\n"
  assert asked == [(path, run, {}, "a.wav", ["0", "1"])]
  with pytest.raises(ConfigError, match=r"^--image: this run reads no images"):
    draw_file(run, {}, "image", "a.png", path.parent)


def test_a_recurrent_model_has_its_alignment():
  for length in (1, 7):
    maps = drawn("seq2seq", "additive", symbols(length), target="3 4")
    assert list(maps) == ["decoder_cross_attention"]
    [alignment] = maps.values()
    assert alignment.title == "decoder, cross-attention"
    assert alignment.weights.shape == (1, 3, length + 1)
    np.testing.assert_allclose(alignment.weights.sum(-1), 1, rtol=1e-5)


def test_an_encoder_has_its_source():
  [shown] = drawn("encoder", "dense", "5 6").values()
  assert shown.query_labels == shown.key_labels == ["5", "6"]
  run, variables = untrained("encoder")
  with pytest.raises(ConfigError, match=r"^target: this model is an encoder"):
    make_example(run, variables, "5 6", "5")


def test_a_decoder_shows_its_prompt_and_what_goes_on_after_it():
  run, variables = untrained("copying decoder")
  [alone] = make_example(run, variables, "5 6")["inputs"].tolist()
  assert run.task.labels(alone) == ["5", "6", "|"]
  # The end is written and not read.
  [both] = make_example(run, variables, "5 6", "5 6")["inputs"].tolist()
  assert run.task.labels(both) == ["5", "6", "|", "5", "6"]


@pytest.mark.parametrize(
  ("kind", "mechanism"),
  [("encoder_decoder", "dense"), ("seq2seq", "additive")][
    : 1 + is_here("seq2seq")
  ],
)
def test_the_default_target_is_what_is_generated(kind, mechanism):
  run, variables = untrained(kind, mechanism)
  example = make_example(run, variables, "1 2 3")
  [targets] = example["targets"]
  assert example["inputs"].tolist() == [[1, *targets[:-1]]]
  # Greedy: what it writes is the likeliest after what it wrote before.
  logits = tiny.forward(run.model, variables, example)
  np.testing.assert_array_equal(logits[0].argmax(-1), targets)


def test_generation_stops_at_the_end():
  run, variables = untrained("encoder_decoder")
  tokens = np.array([[7, 8, run.task.eos_id, 0, 0, 0, 0, 0]])

  def generate(variables, inputs, *, max_length):
    assert max_length == tokens.shape[1]
    return models.Generated(tokens, np.zeros(1))

  example = make_example(run._replace(generate=generate), variables, "1")
  assert example["targets"].tolist() == [[7, 8, 2]]
  assert example["inputs"].tolist() == [[1, 7, 8]]
  assert example["weights"].tolist() == [[1, 1, 1]]


def test_a_mechanism_that_cannot_decode_needs_a_target():
  run, variables = untrained("encoder_decoder")

  def generate(*args, **options):
    raise ValueError("decoder_attention: cannot decode")

  run = run._replace(generate=generate)
  with pytest.raises(ConfigError, match=r"^target: missing, and decoder_att"):
    make_example(run, variables, "1")
  assert make_example(run, variables, "1", "2")["targets"].shape == (1, 2)


@pytest.mark.parametrize(
  ("kind", "text", "target", "message"),
  [
    ("encoder_decoder", " ", None, "text: expected a text, got ' '"),
    ("encoder_decoder", "1", "", "target: expected a text, got ''"),
    ("encoder_decoder", symbols(8), None, "text: expected 1 to 7 symbols"),
    ("encoder_decoder", "9", None, "text: expected symbols 0 to 7"),
    ("encoder_decoder", "1", "x", "target: expected symbols 0 to 7"),
    ("decoder", symbols(9), None, "text: expected 1 to 8 symbols"),
    ("decoder", symbols(5), symbols(4), "target: 9 tokens are too long"),
  ],
)
def test_what_cannot_be_shown(kind, text, target, message):
  run, variables = untrained(kind)
  with pytest.raises(ConfigError, match=f"^{message}"):
    make_example(run, variables, text, target)


def test_a_source_longer_than_the_model():
  run, variables = untrained("encoder")
  run.task.max_source_length = 2
  try:
    with pytest.raises(ConfigError, match=r"^text: 3 tokens are too long"):
      make_example(run, variables, "1 2 3")
  finally:
    run.task.max_source_length = 8
