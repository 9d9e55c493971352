"""Environment sets: named tables of environment variables, how they are merged and shown."""
