"""Several ranks: who this one is, whether all ranks agree, and which rank was lost."""
