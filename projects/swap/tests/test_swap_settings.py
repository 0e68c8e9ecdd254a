"""What is typed becomes mechanisms, or one line that says what is wrong."""

import pytest

from attention import ATTENTIONS
from projects.swap.settings import Settings, numbers
from settings.fields import error_line
from tests.refusals import assert_refused


def settings(**options):
  return Settings(**{"weights": "w", "text": "t", **options})


def test_all_is_every_mechanism_with_sizes_for_the_context():
  short = settings().choices(64)
  assert [choice.label for choice in short] == list(ATTENTIONS)
  long = {c.label: c.config.options for c in settings().choices(256)}
  assert long["sliding_window"]["window"] > 8
  assert settings().choices(255) == short
  assert dict(short[0].config.options) == {}
  windows = [c.config for c in short if c.label == "sliding_window"]
  assert [config.options for config in windows] == [{"window": 8}]


def test_options_and_several_of_one_name():
  typed = ["performer:num_features=32", "performer:num_features=64:kernel=relu"]
  typed.append("sliding_window:window=(5, 0)")
  choices = settings(attention=", ".join(typed)).choices(64)
  assert [c.label for c in choices] == typed
  assert choices[1].config.options == {"num_features": 64, "kernel": "relu"}
  assert choices[2].config.options == {"window": (5, 0)}


def test_a_mechanism_of_somebody_else():
  name = "attention.performer:performer"
  (choice,) = settings(attention=f"{name}:num_features=8").choices(64)
  assert choice.config.name == name
  assert choice.config.options == {"num_features": 8}


def test_faults():
  def refused(**options):
    with pytest.raises(ValueError, match="Settings") as error:
      settings(**options)
    raise ValueError(error_line(error.value))

  assert_refused(
    refused,
    *({name: ""} for name in ("weights", "text", "attention")),
    *({"attention": x} for x in ("lsh,lsh", "lsh:chunk_size=8:x")),
    {"attention": "moba:top_k=(4,2),moba:top_k=[4,2]"},
    *({"context": 1}, {"length": 0}, {"batch_size": 0}, {"batches": -1}),
    *({"transfer_steps": -1}, {"transfer_rate": 0.0}),
    {"finetune_rate": float("nan")},
    *({"keep": x} for x in ((), (1, 1))),
    ("keep[1]", {"keep": (0, -1)}),
    *({"length": 1}, {"transfer_rate": 1.01}, {"finetune_rate": 1.01}),
    *({"finetune_rate": 0.0}, {"finetune_steps": -1}, {"seed": -1}),
    *({"seed": 2**31}, {"batch_size": 2**31}),
  )
  settings(context=2, length=2, batch_size=1, transfer_rate=1.0, seed=2**31 - 1)


@pytest.mark.parametrize(
  ("typed", "message"),
  [
    ("perfomer", "did you mean 'performer'"),
    ("performer:features=8", "features: performer has no such option"),
    ("performer:num_features=0", "num_features"),
    ("nowhere.to:be_found", "no module named 'nowhere'"),
  ],
)
def test_faults_of_mechanisms(typed, message):
  with pytest.raises(ValueError, match=message) as error:
    settings(attention=typed).choices(64)
  assert str(error.value).startswith("attention: ")


def test_numbers_of_layers():
  assert numbers(["0", " 2"]) == (0, 2)
  with pytest.raises(ValueError, match="keep: expected numbers of layers"):
    numbers(["first"])
