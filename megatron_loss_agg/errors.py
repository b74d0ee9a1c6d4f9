"""Named errors. Each message says what was got, what was expected and what to change."""

from __future__ import annotations


class AggregationError(ValueError):
    """Base of every error that this package raises about its input."""


class ModeError(AggregationError):
    """An unknown mode or preset, or an option that the mode does not take."""


class DivisorError(AggregationError):
    """A divisor that is missing, not allowed, or not a finite positive number."""


class MaskError(AggregationError):
    """A loss mask (or loss) of wrong shape, dtype or values."""


class GroupError(AggregationError):
    """Missing or misshapen prompt ids, rollout ids or sequence offsets."""


class LayoutError(AggregationError):
    """A sequence that cannot be split over context-parallel ranks as asked."""


class PolicyError(AggregationError):
    """Inputs of a per-token loss that do not fit together, or an option out of its range."""


class FunctionError(AggregationError):
    """A function of the user's that cannot be loaded, or returns something unusable."""


class HostError(AggregationError):
    """An installed Megatron, or a combination of its flags, that the plugin cannot undo exactly."""


class StepError(AggregationError):
    """An optimizer step of several calls that does not add up."""


class PeerError(AggregationError):
    """Another rank found bad input; this rank stops with it instead of waiting for it."""


class InputError(AggregationError):
    """A command-line value, or a line of a file, that cannot be read."""


class DependencyError(AggregationError):
    """An optional dependency that is not installed."""


class ReportError(AggregationError):
    """Metrics that cannot be reduced over microbatches, or over ranks."""
