"""Perceiver IO: latents that attend to images or bytes of any length."""

MODELS = {"perceiver": "projects.perceiver.config:PerceiverConfig"}
FAMILIES = {"perceiver": "projects.perceiver.family:PERCEIVER"}
