"""Named errors. A message says what was got, what was expected, and what to change."""

from __future__ import annotations


class AggregationError(ValueError):
    """Base class of all errors that this package raises."""


class OptionError(AggregationError):
    """An option, flag or user's function that is unknown, unusable or contradicts another one."""


class DataError(AggregationError):
    """A mask, id, offset, split, loss or report that does not fit; a step that does not add up."""


class HostError(AggregationError):
    """A Megatron version, setting or script whose loss cannot be weighted exactly."""


class PeerError(AggregationError):
    """Another rank failed; raised here so that this rank does not hang."""
