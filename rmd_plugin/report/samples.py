"""The samples that a detector finds most unknown and most ordinary, kept beside the numbers of a comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from rmd_plugin.compare.rows import THRESHOLD, Row, at_level, levels, select
from rmd_plugin.report.cards import Card, make_card, preview
from rmd_plugin.report.document import Picture
from rmd_plugin.report.scores import ID, Scores
from rmd_plugin.report.tables import ood_sets, ranking
from rmd_plugin.untrusted import one_line

End = Literal["highest", "lowest"]

#: samples of one kind, OOD sets, and letters of a text that are kept
_COUNT, _SETS, _LETTERS = 8, 3, 1000
_SOURCE = re.compile(r"data:image/(?:png|jpeg);base64,[A-Za-z0-9+/]+=*")


@dataclass(frozen=True)
class Sample:
    """One sample of a set: its position there, its score, its class or nothing, and how it looks or what it says."""

    position: int
    score: float
    label: str = ""
    picture: Picture | None = None
    text: str = ""


@dataclass(frozen=True)
class SampleGroup:
    """Samples at one end of the scores of a set, the outermost first."""

    ood: str  #: the set, ``test`` for the ID test set
    end: End
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Samples:
    """The outermost samples by the scores of one detector."""

    detector: str
    groups: Sequence[SampleGroup]

    def to_plain(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)


def collect_samples(
    rows: Sequence[Row], scores: Scores, raw: Callable[[str, int], tuple[object, str]]
) -> Samples | None:
    """Samples by the detector that leads the table: ID ones with the highest scores, OOD ones with both ends.

    Args:
        rows: of one comparison.
        scores: of its detectors, in the order of the data.
        raw: set and position -> the item before any transform, and its class or nothing.

    Returns:
        None if nothing has a look: features, for example.
    """
    leader = next((name for name in ranking(rows) if name in scores), None)
    if leader is None:
        return None
    distances = ood_sets(rows)
    sets = sorted((name for name in distances if name in scores[leader]), key=lambda name: distances[name] == "far")
    wanted: list[tuple[str, End]] = [(ID, "highest")]
    wanted += [(name, end) for name in sets[:_SETS] for end in get_args(End)]
    groups = []
    for name, end in wanted:
        values = scores[leader].get(name, np.empty(0))
        order = np.argsort(values if end == "lowest" else -values, kind="stable")[:_COUNT]
        samples = [_sample(raw, name, int(place), float(values[place])) for place in order]
        groups.append(SampleGroup(name, end, samples))
    shown = any(sample.picture or sample.text for group in groups for sample in group.samples)
    return Samples(leader, [group for group in groups if group.samples]) if shown else None


def _sample(raw: Callable[[str, int], tuple[object, str]], name: str, position: int, score: float) -> Sample:
    item, label = raw(name, position)
    seen = preview(item, one_line(f"Sample {position} of {name}"))
    text = one_line(seen[:_LETTERS]) if isinstance(seen, str) else ""
    return Sample(position, score, one_line(label), seen if isinstance(seen, Picture) else None, text)


def parse_samples(content: Mapping[str, Any]) -> Samples:
    """Samples from plain data that somebody else may have written. ValueError if it does not hold any."""
    try:
        return Samples(one_line(content["detector"]), [_parse_group(group) for group in content["groups"]])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it does not hold samples of a comparison ({type(error).__name__}: {error})") from error


def _parse_group(content: Mapping[str, Any]) -> SampleGroup:
    if content["end"] not in get_args(End):
        raise ValueError(f"end must be one of {', '.join(get_args(End))}, got {content['end']!r}")
    return SampleGroup(one_line(content["ood"]), content["end"], [_parse_sample(item) for item in content["samples"]])


def _parse_sample(content: Mapping[str, Any]) -> Sample:
    found = content["picture"]
    picture = None
    if found is not None:
        if not _SOURCE.fullmatch(str(found["source"])):
            raise ValueError("a picture must be a PNG or JPEG inside the file")
        picture = Picture(str(found["source"]), one_line(found["alt"]), int(found["width"]), int(found["height"]))
    texts = (one_line(content["label"]), picture, one_line(content["text"]))
    return Sample(int(content["position"]), float(content["score"]), *texts)


def sample_cards(samples: Samples, rows: Sequence[Row]) -> list[tuple[SampleGroup, list[Card]]]:
    """Each group with its cards; flagged is what lies above the threshold of the smallest level, if there is one."""
    found = [row for alpha in levels(rows) for row in select(rows, metric=at_level(THRESHOLD, alpha), status="ok")]
    threshold = next((row.value for row in found if row.detector == samples.detector), math.inf)
    return [(group, [_card(sample, threshold) for sample in group.samples]) for group in samples.groups]


def _card(sample: Sample, threshold: float) -> Card:
    details = [f"score {sample.score:.4g}".replace("-", "−")]
    return make_card(
        sample.label or f"no. {sample.position}", details, sample.score > threshold, sample.picture or sample.text
    )
