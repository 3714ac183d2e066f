"""The six tasks of MAD (mechanistic architecture design), at the published baseline difficulty."""
