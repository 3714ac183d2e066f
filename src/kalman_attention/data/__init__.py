"""Text into shards of tokens, and shards into batches; numpy, torch and tokenizers only."""
