"""Sends a run to Weights & Biases or MLflow, from its own files, in a process of its own."""
