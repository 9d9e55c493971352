"""Hugging Face <-> NeMo checkpoints, with proof that both hold the same model."""
