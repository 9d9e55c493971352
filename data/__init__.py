"""ON WHAT to train: text files to a prepared corpus, its checks, blends, and the data module."""
