"""Reports of results: one self-contained page, and figures as files."""
