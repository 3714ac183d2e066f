"""What ``kla bench`` measures, one file per subject."""
