"""PromQL as the boards need it: every selector takes the board's variables, every quotient a guarded denominator."""

from __future__ import annotations

PREFIX = "truedraft_"
WINDOW = "$__rate_interval"  # at least four scrapes, and as wide as a pixel: what is between two points is not lost
RANGE = "$__range"  # the board's time range
CHOSEN = 'job=~"$job", model_name=~"$model_name", instance=~"$instance"'
PROCESSES = 'job=~"$job", instance=~"$instance"'  # of ``up``, which knows no model
SERVICES = 'job=~"$job", model_name=~"$model_name"'  # of rules that add up instances


def metric(name: str, where: str = "") -> str:
    """The series of one metric that the variables choose, and of these where a matcher like ``state="free"`` holds."""
    return f"{PREFIX}{name}{{{CHOSEN}{', ' if where else ''}{where}}}"


def total(expression: str, *by: str) -> str:
    return f"sum{_by(by)} ({expression})"


def rate(name: str, *by: str, where: str = "") -> str:
    """A second, over all that were chosen, or for each value of ``by``."""
    return total(f"rate({metric(name, where)}[{WINDOW}])", *by)


def increase(name: str, *by: str, where: str = "") -> str:
    """In the board's time range."""
    return total(f"increase({metric(name, where)}[{RANGE}])", *by)


def share(part: str, whole: str) -> str:
    """``part / whole``, and nothing where ``whole`` is 0: an idle server has no ratio, and 0 / 0 is no 0."""
    return f"{part} / ({whole} > 0)"


def share_of_one(part: str, whole: str) -> str:
    """The same where ``whole`` has no labels and ``part`` has some."""
    return f"{part} / on () group_left () ({whole} > 0)"


def mean(histogram: str, *by: str) -> str:
    """Of what a histogram observed."""
    return share(rate(f"{histogram}_sum", *by), rate(f"{histogram}_count", *by))


def quantile(q: float, histogram: str, *by: str) -> str:
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', 'le', *by)})"


def worst(name: str, *by: str) -> str:
    """The largest value of a gauge."""
    return f"max{_by(by)} ({metric(name)})"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
