"""From text files to tokenised .bin/.idx corpora."""
