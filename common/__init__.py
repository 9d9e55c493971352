"""What every other folder imports: errors, run directory, logs, machine facts. Imports neither torch nor NeMo."""
