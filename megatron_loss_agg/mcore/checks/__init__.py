"""Checks of every hook: they raise, and change no number. `step` calls them."""
