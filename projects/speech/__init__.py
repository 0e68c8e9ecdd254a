"""Speech and dialled digits: the Conformer, trained by CTC."""
