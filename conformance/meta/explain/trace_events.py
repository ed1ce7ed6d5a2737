"""Checks Trace Event Format JSON: finds events that ui.perfetto.dev would silently drop or draw wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

Event = Mapping[str, object]
Track = tuple[object, object]


def _track(event: Event) -> Track:
    return event["pid"], event["tid"]


def _number(event: Event, key: str) -> float:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else float("nan")


def problems(events: Sequence[Event]) -> Iterator[str]:
    """A sentence for each wrong event: unnamed tracks, overlapping slices, arrows without an end."""
    slices: dict[Track, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            begins, lasts = _number(event, "ts"), _number(event, "dur")
            if not lasts >= 0:
                yield f"slice {event['name']!r} lasts {event.get('dur')}"
            slices.setdefault(_track(event), []).append((begins, begins + lasts))
    named = {_track(event) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    for track, pieces in slices.items():
        if track not in named or track[0] not in processes:
            yield f"track {track} has slices but no name"
        for (begins, ends), (next_begins, _) in pairwise(sorted(pieces)):
            if next_begins < ends:
                yield f"track {track}: a slice begins at {next_begins} inside {begins}..{ends}"
    yield from _arrow_problems(events, slices)


def _arrow_problems(events: Sequence[Event], slices: Mapping[Track, Sequence[tuple[float, float]]]) -> Iterator[str]:
    arrows: dict[object, dict[object, list[Event]]] = {}
    for event in events:
        if event["ph"] in ("s", "f"):
            arrows.setdefault(event["id"], {}).setdefault(event["ph"], []).append(event)
    for number, ends in arrows.items():
        if sorted(map(str, ends)) != ["f", "s"] or any(len(found) != 1 for found in ends.values()):
            yield f"arrow {number} has not one beginning and one end"
            continue
        (start,), (finish,) = ends["s"], ends["f"]
        if _number(start, "ts") > _number(finish, "ts"):
            yield f"arrow {number} goes back from {start['ts']} to {finish['ts']}"
        for event in (start, finish):
            if not any(begins <= _number(event, "ts") <= end for begins, end in slices.get(_track(event), ())):
                yield f"arrow {number} touches no slice of track {_track(event)} at {event['ts']}"
