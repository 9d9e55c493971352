"""While it runs: show a run (monitor), list runs, and say why one failed (diagnose). Reads files; needs no torch."""
