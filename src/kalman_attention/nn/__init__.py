"""Layers: the KLA mixer and the parts it is made of."""
