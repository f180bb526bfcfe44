"""Bundles on their way to a station: sealed, checked, kept in slots, tried out, taken back."""
