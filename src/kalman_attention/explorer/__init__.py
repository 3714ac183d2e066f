"""One page to look inside a model: tokens, predictions, and what each token reads from."""
