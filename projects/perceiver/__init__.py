"""Perceiver IO: latents that read images or bytes of any length."""

MODELS = {"perceiver": "projects.perceiver.config:PerceiverConfig"}
FAMILIES = {"perceiver": "projects.perceiver.family:PERCEIVER"}
