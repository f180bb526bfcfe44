"""Scan to parts, sizes and pictures. It knows points and millimetres, not models or lines."""
