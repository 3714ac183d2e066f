"""Evaluation of trained models: accuracy, likelihood, calibration and uncertainty."""
