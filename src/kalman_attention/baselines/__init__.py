"""Other mixers with the interface of ``nn.KLA``, for comparison and for hybrid models."""
