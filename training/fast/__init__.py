"""The fast path: replacements bound to named hooks of the built objects, each with a plain path it is compared to."""
