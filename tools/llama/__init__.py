"""`pagedkv run`: a small real model as a caller of the cache, with its weights, its tokenizer and the command."""
