"""Language models: an embedding, a stack of blocks with any mixers, and a head."""
