"""The prefix index: token-exact, beside an obvious model, and what it must never offer.  (C1.2, C2.1, C2.2)"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import PrefixIndex, PrefixMatch
from pagedkv.graphs import prefix_index as module
from tests.hostile.interrupt import Interrupt
from tests.hostile.values import hostile_values


class Slow:
    """Every text in a list; the one used last stands last."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, list[int], object, str]] = []

    def match(self, tokens: list[int], salt: object) -> PrefixMatch | None:
        best: tuple[tuple[int, bool, int], PrefixMatch] | None = None
        for place, (handle, text, own_salt, frontiers) in enumerate(self.entries):
            common = next((i for i, (a, b) in enumerate(zip(text, tokens, strict=False)) if a != b),
                          min(len(text), len(tokens)))
            if own_salt != salt or not common or (frontiers == "end" and common < len(text)):
                continue
            rank = (common, common == len(text), place)
            if best is None or rank > best[0]:
                best = rank, PrefixMatch(handle, common, common == len(text))
        if best is not None:
            self.touch(best[1].handle)
        return None if best is None else best[1]

    def touch(self, handle: object) -> None:
        self.entries.sort(key=lambda entry: entry[0] == handle)


def check(index: PrefixIndex) -> None:
    """Demand that the tree is one: edges begin differently, no node is idle, and `latest` is the one used last."""
    count = 0
    for root in index._roots.values():
        nodes = [root]
        while nodes:
            node = nodes.pop()
            count += len(node.ends)
            assert node is root or (node.edge.size and (node.ends or len(node.children) > 1))
            assert node.latest is module._latest_of(node)
            for token, child in node.children.items():
                assert (child.parent, int(child.edge[0])) == (node, token)
                nodes.append(child)
    assert count == len(index)


@pytest.mark.parametrize("symbols", [1, 2, 5])
def test_the_index_answers_as_a_list_of_texts(symbols: int, seed: int) -> None:
    """Random texts of few symbols, so that prefixes collide: longest match, uses, removals, two salts."""
    rng, index, slow = random.Random(seed), PrefixIndex(), Slow()
    handles = 0

    def text() -> list[int]:
        if slow.entries and rng.random() < 0.6:  # a prefix of an earlier one, and something else
            base = rng.choice(slow.entries)[1]
            return base[: rng.randint(0, len(base))] + [rng.randrange(symbols) for _ in range(rng.randint(1, 6))]
        return [rng.randrange(symbols) for _ in range(rng.randint(1, 12))]

    for number in range(2000):
        what, salt = rng.random(), rng.choice(["a", None])
        if what < 0.35:
            handles += 1
            tokens, frontiers = text(), rng.choice(["any", "any", "end"])
            assert index.insert(np.array(tokens, np.int32), handles, salt=salt, frontiers=frontiers)  # type: ignore[arg-type]
            slow.entries.append((handles, tokens, salt, frontiers))
        elif what < 0.6 and slow.entries:
            gone = rng.choice(slow.entries)[0]
            index.remove(gone)
            slow.entries = [entry for entry in slow.entries if entry[0] != gone]
        elif what < 0.65 and slow.entries:
            used = rng.choice(slow.entries)[0]
            index.touch(used)
            slow.touch(used)
        else:
            prompt = text()
            assert index.match(prompt, salt=salt) == slow.match(prompt, salt), prompt
        assert list(index) == [entry[0] for entry in slow.entries]
        if number % 20 == 0:
            check(index)
            for handle, tokens, own_salt, frontiers in slow.entries:
                covered = [one for one, other, salt, kind in slow.entries
                           if salt == own_salt and len(other) < len(tokens) and tokens[: len(other)] == other
                           and kind == "any" == frontiers]
                assert sorted(index.covered(handle)) == sorted(covered)  # type: ignore[type-var]
    for left in list(index):
        index.remove(left)
    check(index)


def test_a_match_ends_at_any_token_and_never_beyond_the_prompt() -> None:
    """C2.1: frontiers of 1, 63, 64, 65 and all tokens; the caller leaves one token to write."""
    index, tokens = PrefixIndex(), np.arange(200)
    index.insert(tokens, "kept")
    for count in (1, 63, 64, 65, 130, 199, 200):
        assert index.match(tokens[:count]) == PrefixMatch("kept", count, count == 200)
        assert index.match([*range(count), 9999]) == PrefixMatch("kept", count, count == 200)
    assert index.match([9999, *range(50)]) is None
    assert index.match([]) is None


def test_a_model_with_a_state_goes_on_at_the_end_only() -> None:
    """C2.2, C16.16: tokens in common are no hit where there is no state; a shorter whole text is one."""
    index = PrefixIndex()
    index.insert(range(100), "long", frontiers="end")
    assert index.match(range(99)) is None
    index.insert(range(40), "short", frontiers="end")
    assert index.match(range(99)) == PrefixMatch("short", 40, True)
    assert index.match(range(120)) == PrefixMatch("long", 100, True)
    assert index.covered("long") == []


def test_another_identity_never_matches() -> None:
    """S40: equal placeholder tokens of two images."""
    index = PrefixIndex()
    index.insert([1, 2, 3], "first", salt="digest 1")
    assert index.match([1, 2, 3], salt="digest 2") is None
    assert index.match([1, 2, 3]) is None
    assert index.match([1, 2, 3], salt="digest 1") == PrefixMatch("first", 3, True)


def test_equal_hashes_change_nothing() -> None:
    """S41: every handle and every salt with the same hash; tokens are compared as tokens."""
    class Same(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            return str.__eq__(self, other)

    index = PrefixIndex()
    for number in range(20):
        index.insert([number, 1, 2], Same(f"handle {number}"), salt=Same(f"salt {number % 3}"))
    for number in range(20):
        found = index.match([number, 1, 9], salt=Same(f"salt {number % 3}"))
        assert found == PrefixMatch(Same(f"handle {number}"), 2, False)
        assert index.match([number, 1, 9], salt=Same(f"salt {(number + 1) % 3}")) is None


def test_what_was_removed_is_never_found() -> None:
    """S37: not by its own text, a longer or a shorter one; another continuation may have its page groups by then."""
    index = PrefixIndex()
    index.insert(range(100), "x")
    index.insert([*range(50), 7], "y")
    index.remove("x")
    for count in (10, 50, 99, 100, 130):
        found = index.match(range(count))
        assert found is None or found.handle == "y"
    index.remove("y")
    assert index.match(range(10)) is None
    assert len(index) == 0


def test_a_full_index_skips_and_counts() -> None:
    """S84: room for one, and a request that offers seven."""
    index = PrefixIndex(entries_max=1)
    taken = [index.insert([number], number) for number in range(7)]
    assert (taken, index.skipped, len(index)) == ([True, *[False] * 6], 6, 1)


TEXTS: dict[str, tuple[list[int], object]] = {
    "a": ([5, 6, 5, 6, 7], None), "b": ([5, 6, 5, 6, 7, 8], None), "c": ([5, 6, 5, 6, 9], None), "d": ([2, 2], None),
    "z": ([5, 6], "z"), "cuts": ([5, 6, 9], None), "within": ([5, 6], None), "elsewhere": ([5], "x"),
}
CALLS: dict[str, Callable[[PrefixIndex], object]] = {
    **{f"insert {name}": lambda index, name=name: index.insert(TEXTS[name][0], name, salt=TEXTS[name][1])  # type: ignore[misc]
       for name in ("cuts", "within", "elsewhere")},
    "remove a leaf": lambda index: index.remove("b"), "remove and join": lambda index: index.remove("d"),
    "remove a branch": lambda index: list(map(index.remove, "ca")), "remove the last": lambda index: index.remove("z"),
    "touch": lambda index: index.touch("b"), "match": lambda index: index.match([5, 6, 5, 6, 7]),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_is_done_or_not_begun(name: str) -> None:
    """S37, S41: every line once; then matches are right for the handles that are left, and the tree is one again."""
    index = staged()
    with Interrupt(0, KeyboardInterrupt) as count:
        CALLS[name](index)
    for at in range(1, count.lines + 1):
        index = staged()
        with pytest.raises(KeyboardInterrupt, match=f"at line {at}:"), Interrupt(at, KeyboardInterrupt):
            CALLS[name](index)
        require_matches(index)
        if set(index) == set("abcdz"):
            CALLS[name](index)
            require_matches(index)
        for handle in index:
            index.remove(handle)
            require_matches(index)
        assert not index._roots


def staged() -> PrefixIndex:
    """Return an index with some texts."""
    index = PrefixIndex()
    for handle in "abcdz":
        index.insert(TEXTS[handle][0], handle, salt=TEXTS[handle][1])
    return index


def require_matches(index: PrefixIndex) -> None:
    """Compare matches with those of a list, and look at the tree."""
    slow = Slow()
    slow.entries = [(handle, *TEXTS[handle], "any") for handle in index]  # type: ignore[index,misc]
    for salt in (None, "z", "x"):
        for text in ([5, 6, 5, 6, 5, 6, 7], [5, 6, 5, 6, 7, 8, 1], [5, 6, 5, 6, 9], [5, 6, 9], [5, 1], [2, 2], [9]):
            assert index.match(text, salt=salt) == slow.match(text, salt), text
    check(index)


def test_a_removal_is_as_quick_with_many_salts() -> None:
    """S83: an image a text; no call looks at the others."""
    counts = []
    for texts in (10, 1000):
        index = PrefixIndex()
        for number in range(texts):
            index.insert([1, 2], number, salt=number)
        with Interrupt(0, KeyboardInterrupt) as count:
            index.remove(5)
        counts.append(count.lines)

    assert counts[0] == counts[1]


def test_the_index_refuses_what_it_could_not_offer() -> None:
    """A handle twice, no tokens, other frontiers, what cannot be hashed; nothing changes."""
    index = PrefixIndex()
    index.insert([1, 2], "a")
    calls: list[Any] = [
        lambda: index.insert([1], "a"), lambda: index.insert([], "b"), lambda: index.insert([-1], "b"),
        lambda: index.insert([1], "b", frontiers="some"), lambda: index.insert([1], []),  # type: ignore[arg-type]
        lambda: index.insert([1], "b", salt={}), lambda: index.match([1], salt=[]), lambda: index.remove("b"),  # type: ignore[arg-type]
        lambda: index.touch("b"), lambda: PrefixIndex(entries_max=0),
    ]
    for call in calls:
        with pytest.raises(pk.MisuseError):
            call()
    for _, value in hostile_values():
        for act in (index.match, index.remove, lambda value: index.insert(value, "c"),
                    lambda value: index.match([5], salt=value)):
            try:
                act(value)
            except pk.MisuseError:
                continue
            if "c" in index:
                index.remove("c")
    assert list(index) == ["a"]
    check(index)
