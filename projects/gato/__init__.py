"""Gato: one decoder for text, captions of images and control of a pole."""
