"""Evaluation of an exported model with the lm-evaluation-harness: tasks, scores, paired comparison."""
