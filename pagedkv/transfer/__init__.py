"""Transfers: copies of whole pages between device and host, and beside decode."""
