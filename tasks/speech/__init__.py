"""Recognition of speech and of dialled digits: a recording to its symbols."""

from tasks.speech.config import SpeechConfig
from tasks.speech.task import SpeechTask, make

__all__ = ["SpeechConfig", "SpeechTask", "make"]
