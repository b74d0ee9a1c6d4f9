"""Named errors. A message is two sentences: what was got where something else is needed; the remedy."""

from __future__ import annotations


class AggregationError(ValueError):
    """Base class of all errors that this package raises."""


class OptionError(AggregationError):
    """An option, a flag or a user's function that is unknown, unusable or conflicts with another."""


class DataError(AggregationError):
    """A mask, id, offset, split, loss or report that does not fit, or a step that does not add up."""


class HostError(AggregationError):
    """A Megatron version, setting or script whose loss cannot be weighed exactly."""


class PeerError(AggregationError):
    """Another rank failed; raised here so that this rank does not hang."""
