"""From a line, its evidence and people's labels to a signed bundle (`python -m training.line`)."""
