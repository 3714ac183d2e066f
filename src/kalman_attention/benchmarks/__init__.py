"""Speed and memory on this machine: what ``kla bench`` measures, a module for each subject."""

LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
"""Sequence lengths of the paper's scaling figures."""
BATCH, CHANNELS, SLOTS = 1, 960, 16
"""B, D and N of the paper's scaling figures."""
