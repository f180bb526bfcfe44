"""Training side: data, fine-tuning, evaluation. Run from a checkout, never on a station."""
