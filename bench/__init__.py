"""How fast: each bench prints JSON, ratios measured in one run."""
