"""The `pagedkv` command and what it runs: callers like any other, which use public names only."""
