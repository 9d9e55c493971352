"""Several ranks: which one this is, whether all ranks agree, and which one was lost."""
