"""The record of decisions: the journal, its words, and its replay."""
