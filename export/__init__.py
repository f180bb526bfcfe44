"""Checkpoint -> the bundle that a station runs. Runs on a build machine, never on a station."""
