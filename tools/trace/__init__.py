"""Replays of request traces through a scheduler with a retention policy."""
