"""What the metrics say of images of registries."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from forestage.events import ImageArrival
from forestage.features.contexts import MetricFamily, MetricsPart

if TYPE_CHECKING:
    from forestage.features.contexts import MetricsFacts


def read_metrics(facts: "MetricsFacts") -> MetricsPart:
    """Return how images came, and the imports that steps waited and wait for. Pure."""
    return MetricsPart(families=tuple(_list_families(facts)))


def _list_families(facts: "MetricsFacts") -> Iterator[MetricFamily]:
    imports = facts.status.find_field("imports") if facts.status else None
    if isinstance(imports, tuple):
        text = "Steps that wait for an image of a registry."
        yield MetricFamily("imports_under_way", text, after="jobs_not_called", value=len(imports))
    came = {name: facts.tally.registry.get(name, 0) for name in get_args(ImageArrival) if name}
    text = "Images of registries that steps named, by how they came."
    yield MetricFamily(
        "registry_images", text, after="errors", kind="counter", label="came", values=came
    )
    text, waits = "What a step waited whose image was imported.", facts.tally.imports
    yield MetricFamily("import_wait_seconds", text, after="wait_seconds", histogram=waits)
