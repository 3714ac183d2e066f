"""The paper's experiments: each a list of cells, each cell a complete configuration."""
