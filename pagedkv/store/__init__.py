"""The store: the object a caller holds."""
