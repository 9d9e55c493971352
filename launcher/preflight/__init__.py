"""Checks before any GPU time is spent: the machine, the data, the numbers of the plan."""
