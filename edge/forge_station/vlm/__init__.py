"""Qwen2.5-VL without torch: numpy, ONNX Runtime and tokenizers. It knows no check and no part."""
