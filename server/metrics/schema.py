"""Every metric that a server can have, in the order in which they are shown."""

from __future__ import annotations

from server.metrics.kinds import Group, Metric
from server.metrics.of_memory import MEMORY
from server.metrics.of_requests import HEALTH, LATENCY, REQUESTS, TELLING
from server.metrics.of_steps import EQUIVALENCE, SPECULATION, STEPS

GROUPS: tuple[Group, ...] = (REQUESTS, HEALTH, LATENCY, STEPS, SPECULATION, EQUIVALENCE, MEMORY, TELLING)
SCHEMA: dict[str, Metric] = {metric.name: metric for group in GROUPS for metric in group.metrics}


def label_values() -> dict[str, dict[str, tuple[str, ...]]]:
    """Every sample's full name, and the words that each of its labels can hold: none where they follow from the setup.

    A bucket has the label ``le``. For whoever checks a query.
    """
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for metric in SCHEMA.values():
        labels = dict.fromkeys(metric.label_names, ()) | {label.name: label.values for label in metric.labels}
        for name in metric.sample_names:
            found[name] = {**labels, "le": ()} if name.endswith("_bucket") else dict(labels)
    return found
