"""Camera drivers of this package, one module each; see `capture.camera`."""
