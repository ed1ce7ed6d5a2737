"""A spelling that no form of its family lists: which word is wrong, which one was meant, and which forms are nearest.

A form is as far from a spelling as the cheapest way to turn one into the other: a word too many or too few counts 1,
and a word in place of another up to 2, by how unlike they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from backends.vm.bind.forms import Form

MOST_LISTED: Final = 4
"""Forms that a sentence lists."""
_GUESSES: Final = 8
"""Words like a wrong one that are tried in its place."""


def meant(word: str, known: Iterable[str]) -> str:
    """ "; did you mean `WORD`?" for the end of a sentence about an unknown word, or "" if no known one is like it."""
    like = get_close_matches(word, list(known), 1)
    return f"; did you mean `{like[0]}`?" if like else ""


def told_of(parts: tuple[str, ...], family: Sequence[Form], known: Callable[[tuple[str, ...]], bool]) -> str:
    """Sentences on the words of `parts` that no form of the `family` has, and on the nearest forms.

    `known` says whether a spelling has a form. Of the words like a wrong one, one that makes a form was meant.
    """
    words = sorted({word for form in family for slot in form.slots for word in slot.choices})
    said = ""
    for index, part in enumerate(parts):
        if index == 0 or part in words:
            continue
        like = get_close_matches(part, words, _GUESSES)
        right = [one for one in like if known((*parts[:index], one, *parts[index + 1 :]))]
        guess = meant(f".{part}", [f".{one}" for one in right[:1] or like])
        said += f"`.{part}` is no modifier of `{parts[0]}`{guess or ';'} "
    nearest: dict[str, Form] = {}
    # Forms of one spelling differ in their words. The nearest of them counts.
    for form in sorted(family, key=lambda one: (far(one, parts), len(one.spelling))):
        nearest.setdefault(form.spelling, form)
    listed = "; ".join(f"`{form.spelling}` (PTX ISA {form.section})" for form in list(nearest.values())[:MOST_LISTED])
    begins = "The" if said.endswith("? ") else "the"
    return f"{said}{begins} nearest are {listed}"


def far(form: Form, parts: tuple[str, ...]) -> float:
    """How far a form is from a spelling; 0 if it lists it."""
    # What the rest of the form costs, by how many words are read: the last slot first.
    slots, count = form.slots, len(parts)
    costs = [float(count - read) for read in range(count + 1)]
    for slot in reversed(slots):
        behind, lacking = costs, 0.0 if slot.optional else 1.0
        costs = [0.0] * (count + 1)
        costs[count] = behind[count] + lacking
        for read in range(count - 1, -1, -1):
            instead = behind[read + 1] + 2 * _unlike(parts[read], slot.choices)
            costs[read] = min(instead, behind[read] + lacking, costs[read + 1] + 1)
    return costs[0]


@cache
def _unlike(part: str, choices: frozenset[str]) -> float:
    """From 0 for one of the words to 1 for a word that shares no letter with any."""
    return 0.0 if part in choices else 1 - max(SequenceMatcher(None, part, word).ratio() for word in choices)
