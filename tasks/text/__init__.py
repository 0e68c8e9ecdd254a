"""Training on one text file: what is predicted follows from `model.kind`.

A decoder predicts every token from those before it, an encoder predicts tokens
that were masked (BERT), and an encoder-decoder spans that were cut out (T5).
"""

from tasks.text.config import TextConfig
from tasks.text.reading import make
from tasks.text.task import TextTask

__all__ = ["TextConfig", "TextTask", "make"]
