"""What the paper reports, to stand beside what we measure and never among it.

Source: the language-model table of the paper (``tab:lm-main``), in per cent. Every figure is a
multiple of 0.2: each task was scored on 500 items, so a standard error is about 2 points.
"""

SOURCE = "KLA paper, tab:lm-main"
ITEMS = 500

SCORES = {
    "GPT-45M": (16.0, 28.6, 58.0, 40.2, 20.6, 50.0, 27.4, 37.4),
    "Mamba-45M": (9.2, 29.2, 59.8, 37.2, 25.4, 48.8, 25.4, 61.6),
    "GDN-45M": (16.0, 28.2, 58.4, 39.0, 23.4, 52.6, 27.2, 45.2),
    "KLA-45M": (7.6, 28.8, 58.6, 40.6, 23.2, 52.2, 27.4, 63.0),
    "GPT+KLA-45M": (16.0, 28.2, 58.6, 42.8, 23.0, 50.8, 24.4, 62.8),
    "GPT-180M": (28.8, 32.2, 63.4, 51.0, 27.0, 49.2, 31.2, 54.8),
    "Mamba-180M": (24.0, 30.6, 63.0, 51.0, 27.2, 53.8, 33.0, 55.8),
    "GDN-180M": (27.8, 31.6, 60.4, 45.6, 25.8, 53.4, 30.0, 60.8),
    "KLA-180M": (22.4, 34.0, 63.0, 50.0, 26.0, 53.6, 32.4, 60.8),
    "GPT+KLA-180M": (30.2, 34.4, 64.2, 55.8, 29.0, 51.8, 31.0, 63.2),
}
"""Model to its scores, in the order of ``benchmarks.BENCHMARKS``."""
