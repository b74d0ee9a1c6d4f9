"""Checks of every hook: they raise but change no number. `step` calls them."""
