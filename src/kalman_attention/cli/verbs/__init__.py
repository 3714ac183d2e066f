"""The verbs of ``kla``, one file each: options and what is done with them; none imports torch."""
