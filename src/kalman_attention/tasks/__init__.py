"""Synthetic tasks: small problems that each test one ability of a sequence mixer."""
