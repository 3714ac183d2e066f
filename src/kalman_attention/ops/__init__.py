"""One op, many engines, one contract: see ``docs/engines.md``."""
