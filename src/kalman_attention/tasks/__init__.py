"""Synthetic tasks: small worlds in which one ability of a sequence mixer decides."""
