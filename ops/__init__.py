"""Before and after a run: preflight, conversion, reports."""
