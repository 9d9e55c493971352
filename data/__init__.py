"""ON WHAT to train: text files to a prepared corpus, its checks, and the data module."""
