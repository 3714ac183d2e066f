"""Evaluation: what a trained model knows, and whether it knows that it does."""
