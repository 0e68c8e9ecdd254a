"""Speech and dialled digits: the Conformer, trained by CTC."""

MODELS = {"conformer": "projects.speech.config:ConformerConfig"}
TASKS = {"speech": "projects.speech.task:SpeechConfig"}
FAMILIES = {"wav2vec2-conformer": "projects.speech.family:WAV2VEC2_CONFORMER"}
