"""Simulated parts, defects and scanner, used by the demo, the tests and the training data."""
