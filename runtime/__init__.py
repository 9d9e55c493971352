"""Where and how a recipe runs: errors, run spec, run directory, environment sets, backends, execution."""
