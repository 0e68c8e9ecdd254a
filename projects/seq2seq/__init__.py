"""Recurrent encoder and decoder with attention between them (Bahdanau, Luong)."""

MODELS = {"seq2seq": "projects.seq2seq.config:Seq2SeqConfig"}
