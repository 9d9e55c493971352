"""What every other package may import: errors, run directory, logs, machine facts. No torch, no NeMo."""
