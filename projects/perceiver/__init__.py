"""Perceiver IO: latents that read images or bytes of any length."""
