"""What was measured, for people: one page that needs nothing else, and figures as files."""
