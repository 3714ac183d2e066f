"""Other mixers with the interface of ``nn.KLA``, to compare with and to combine with."""
