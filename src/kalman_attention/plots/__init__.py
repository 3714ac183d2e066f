"""Figures. Functions here take arrays and return a figure; nothing else touches matplotlib."""
