"""Environment sets: named tables of environment variables, how they are merged, applied and shown."""
