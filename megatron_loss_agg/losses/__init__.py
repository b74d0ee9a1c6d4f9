"""Losses of tokens, without any reduction."""
