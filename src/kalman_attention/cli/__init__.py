"""The command ``kla``: its verbs, what they measure, and what they share."""
