"""Benchmarks: each prints JSON; what is compared is measured in the same call."""
