"""Recognition of dialled digits with CTC (Conformer).

    python train.py --config=configs/conformer.py
    python train.py --config=configs/conformer.py:flash

After 2.5 minutes on 2 CPU cores shared with other jobs, all digits of the 500 held-out
strings are recognised (error_rate 0.0 at 10 dB). At -10 dB (`--config.task.snr=-10`) the
error rate is 7.8 %, also after 500 steps.

`--config.task.source=folder --config.task.path=FOLDER` reads a folder of audio
files with `transcripts.tsv`, which has a line FILE<tab>TEXT for each file.
`--config.task.source=spoken_digit --config.task.audio_feature=audio
--config.task.text_feature=label` reads a TFDS dataset. The default of
`--config.task.sample_rate` is 8000.

Positions are those of Transformer-XL, which dense, flash, multiplicative and
sliding_window support; other mechanisms need `--config.model.position=rotary`, as in
`configs/conformer.py:performer`.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """Log-mel frames of 8 kHz, two blocks, positions of Transformer-XL."""
  return experiments.training(
    num_steps=500,
    batch_size=32,
    eval_every=100,
    checkpoint_every=250,
    task={
      "name": "speech",
      "source": "tones",
      "path": "",
      "min_digits": 1,
      "max_digits": 8,
      "snr": 10.0,
      "eval_size": 500,
    },
    model={
      "kind": "conformer",
      "num_layers": 2,
      "num_heads": 4,
      "features": 64,
      "mlp_features": 128,
      "kernel_size": 15,
      "position": "transformer_xl",
      "dropout_rate": 0.1,
      "encoder_attention": attentions.layers(attention),
    },
    optimizer={"learning_rate": 2e-3, "weight_decay": 0.01},
  )
