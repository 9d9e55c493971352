"""Sizes of the fast path with which recipes/memory.py estimates its memory: imported without torch."""

VALIDATION_TOKENS = 1024  # whose logits validation computes at once
