"""From a plan to NeMo-Run's configuration: one builder for each slot of a recipe."""
