"""Trained runs at work: text in, text out, and published weights."""
