"""Fine-tuning of Qwen2.5-VL (3B, 7B, or any folder of that class) on transformers, PEFT and TRL."""
