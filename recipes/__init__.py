"""What to train: the registry, the recipes, and the parts they are made of."""
