"""What every other room imports: errors, run directory, logs, machine facts. Imports neither torch nor NeMo."""
