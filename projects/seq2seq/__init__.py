"""Recurrent encoder and decoder with attention between them (Bahdanau, Luong)."""
