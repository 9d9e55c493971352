"""Before a run: what it will train, whether it fits, how long it takes. Imports neither torch nor NeMo."""
