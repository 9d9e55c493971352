"""One typed builder per slot of a recipe; parts do not import each other."""
