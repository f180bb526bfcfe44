"""The nano model: architecture, tokenizer, packed sequences and its own fast training on a CPU."""
