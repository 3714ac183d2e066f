"""The command ``kla``: one file per verb."""
