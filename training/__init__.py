"""Training side: data, fine-tuning, evaluation. Run from a checkout; never installed on a station."""
