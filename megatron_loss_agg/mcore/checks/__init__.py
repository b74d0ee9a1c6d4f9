"""Checks of every hook, in the order in which `hook` calls them; they raise and change no number."""
