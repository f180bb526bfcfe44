"""Cases, their truth, the figures of an evaluation and how they are shown."""
