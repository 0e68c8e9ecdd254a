"""Gato: one decoder for text, image captions and control of a pole."""

MODELS = {"gato": "projects.gato.config:GatoConfig"}
TASKS = {"mixed": "projects.gato.task:MixedConfig"}
FORMER_KINDS = {"gato": ("decoder", "local_positions")}
