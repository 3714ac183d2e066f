"""The parallel scan in plain torch operations, on any device: engines and their common parts."""
