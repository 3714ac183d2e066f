"""Training: parameter groups, schedules, the loop."""
