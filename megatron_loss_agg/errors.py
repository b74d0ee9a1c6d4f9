"""Named errors. Each message says what was given, what was expected and what to change."""

from __future__ import annotations


class AggregationError(ValueError):
    """Base class of all errors that this package raises."""


class ModeError(AggregationError):
    """An unknown mode or preset, or an option that the mode does not support."""


class DivisorError(AggregationError):
    """A divisor that is missing, not supported, or not a finite positive number."""


class MaskError(AggregationError):
    """A loss mask or loss with the wrong shape, dtype or values."""


class GroupError(AggregationError):
    """Missing or malformed ids, or other values by sample, or sequence offsets."""


class LayoutError(AggregationError):
    """Tokens that are not split over context-parallel ranks as requested or declared."""


class PolicyError(AggregationError):
    """Mismatched inputs of a per-token loss, or an option out of range."""


class FunctionError(AggregationError):
    """A user function that cannot be loaded or returns something unusable."""


class HostError(AggregationError):
    """A Megatron version, flags or a script whose loss the plugin cannot weigh exactly."""


class StepError(AggregationError):
    """An optimizer step whose microbatches or calls do not add up."""


class PeerError(AggregationError):
    """Another rank failed on bad input; raised here so that this rank does not hang."""


class InputError(AggregationError):
    """A command-line value or a line of a file that cannot be parsed."""


class DependencyError(AggregationError):
    """An optional dependency that is not installed."""


class ReportError(AggregationError):
    """Metrics that cannot be reduced over microbatches or ranks."""
