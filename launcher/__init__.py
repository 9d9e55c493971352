"""From the command line to started ranks: checks, the run directory, executors."""
