"""Blind review: people label parts before they know what the station said (docs/REVIEW.md)."""
