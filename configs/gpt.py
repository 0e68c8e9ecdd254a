"""Language modelling of a text in subwords, as GPT-2 is trained, sized for a CPU.

    python train.py --config=configs/gpt.py --config.task.path=input.txt
    echo "ROMEO:" | python generate.py --workdir=RUN --max_length=100

`input.txt` is any text file. On tiny Shakespeare, the validation loss is 2.917
nats per subword, or 2.24 bits per character, after 3.4 minutes on 2 CPU cores shared
with other jobs (unigram loss 5.173, bigram loss 3.615).
`--config.task.tokenizer=FOLDER` uses the `tokenizer.json` of GPT-2 or another model.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A pre-norm decoder with learned positions and a context of 64 subwords."""
  return experiments.training(
    num_steps=3000,
    batch_size=16,
    eval_every=500,
    checkpoint_every=1000,
    log_every=100,
    task={
      "name": "text",
      "path": "",
      "context": 64,
      "vocabulary": "subwords",
      "vocab_size": 512,
      "tokenizer": "",
    },
    model={
      "kind": "decoder",
      "num_layers": 4,
      "num_heads": 4,
      "features": 128,
      "mlp_features": 512,
      "activation": "gelu_tanh",
      "attention_bias": True,
      "embedding_scale": 1.0,
      "norm_epsilon": 1e-5,
      "position": "learned",
      "norm": "pre",
      "decoder_attention": attentions.layers(attention),
    },
    optimizer={"final_fraction": 0.1, "b2": 0.99, "weight_decay": 0.1},
  )
