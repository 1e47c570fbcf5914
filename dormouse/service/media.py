"""Which of the formats that there are a client would like best (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Sequence

from dormouse.service.problems import NotAcceptable


def preferred(accept: str | None, offered: Sequence[str]) -> str:
    """The media type offered that `Accept` gives the most weight, the first of equals; `NotAcceptable`."""
    if accept is None or not accept.strip():
        return offered[0]
    ranges = [_parsed(item) for item in accept.split(",") if item.strip()]
    weights = {media_type: _weight(media_type, ranges) for media_type in offered}
    best = max(offered, key=lambda media_type: weights[media_type])
    if not weights[best]:
        raise NotAcceptable(f"there is {', '.join(offered)}; none of them is accepted by {accept[:200]!r}")
    return best


def _parsed(item: str) -> tuple[str, float]:
    media_range, *parameters = (part.strip().lower() for part in item.split(";"))
    weight = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            weight = _number(value.strip())
    return media_range, weight


def _number(text: str) -> float:
    """A weight that is none counts as none."""
    try:
        return min(max(float(text), 0.0), 1.0) if text not in {"nan", "inf"} else 0.0
    except ValueError:
        return 0.0


def _weight(media_type: str, ranges: Sequence[tuple[str, float]]) -> float:
    """That of the most specific range which has it."""
    group = media_type.partition("/")[0]
    for pattern in (media_type, f"{group}/*", "*/*"):
        found = [weight for media_range, weight in ranges if media_range == pattern]
        if found:
            return max(found)
    return 0.0
