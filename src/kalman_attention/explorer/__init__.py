"""A page that shows the inside of a model: tokens, predictions, and what each token reads from."""
