"""Figures. They read results and never train; only this package imports matplotlib.

================  =====================================================================
``training``      learning curves, and accuracy as a function of sequence length
``speed``         time as a function of sequence length and of context length
``beliefs``       beliefs, posterior variance, attention maps, scores of texts, series
``common``        what figures share: colours and line styles, axes, files
================  =====================================================================
"""
