"""PrefixIndex: which retained continuation has the longest prefix of a prompt.  (C1.2, C2.1, C2.2)

    index = PrefixIndex()
    index.insert(tokens, continuation)
    found = index.match(prompt_ids[:-1])          # at least one token stays to be written
    if found is not None:
        sequence = store.activate(source=found.handle, frontier=found.tokens, ...)

A tree of token ids; every edge is a run of tokens, and no token is on two edges of one node:

    root ---- 5 6 7 8 ----+---- 9 9 1 ------- A          5 6 7 8 9 9 1
                          +---- 2 ------------+--------- B              5 6 7 8 2
                                              +--- 3 --- C              5 6 7 8 2 3

A match ends at any token, also inside an edge, and never at a page boundary for its own sake (C2.1).  Tokens are
compared with tokens: there is no hash that could collide.  Prompts that differ in something else than tokens, such as
images or an adapter, have different salts, and never match each other.

The index holds handles and asks the store nothing.  The caller inserts a continuation whose state is complete, and
removes it before it is released or moved.  A model without state of its own can go on at any frontier of a
continuation; one with a state only where its state belongs: the caller says which (C2.2).

After an interrupt the next call builds the tree anew from the entries and the parents of their nodes, which each write
leaves right: `parent` and `edge` of a node change in one assignment.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.graphs.decode_loop import token_ids

Int32 = npt.NDArray[np.int32]
Frontiers = Literal["any", "end"]

ENTRIES_MAX = 1 << 30


class PrefixMatch(NamedTuple):
    """A continuation, and how many tokens of the prompt it holds; `is_whole` says whether it holds no more."""

    handle: Hashable
    tokens: int
    is_whole: bool


@dataclass(eq=False)
class _Node:
    """The tokens from the parent to here, and what lies behind them.

    Attributes:
        ends: entries that end here.
        latest: of the entries from here on that resume at any frontier, the one used last; None without one.
    """

    parent: _Node | None
    edge: Int32
    children: dict[int, _Node] = field(default_factory=dict)
    ends: list[_Entry] = field(default_factory=list)
    latest: _Entry | None = None


@dataclass(eq=False)
class _Entry:
    handle: Hashable
    node: _Node
    length: int
    salt: Hashable
    frontiers: Frontiers
    used: int = 0


class PrefixIndex:
    """Continuations of one model by their tokens; a handle is in it at most once.

    Args:
        entries_max: most continuations; a further one is skipped, and counted.

    Attributes:
        skipped: insertions that were not made, because the index was full.
    """

    def __init__(self, *, entries_max: int = ENTRIES_MAX) -> None:
        self.entries_max = pk.checks.checked_integer(
            "entries_max", entries_max, 1, ENTRIES_MAX, clause="C1.2", remedy="pass the most continuations to hold"
        )
        self.skipped = 0
        self._roots: dict[Hashable, _Node] = {}
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # least recently used first
        self._uses = 0
        self._is_changing = False  # stays set after an interrupt

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, Hashable) and handle in self._entries

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the handles, least recently used first."""
        return iter(list(self._entries))

    def insert(
        self, tokens: Iterable[int], handle: Hashable, *, salt: Hashable = None, frontiers: Frontiers = "any"
    ) -> bool:
        """Add a continuation with complete state, as the one used last; say whether there was room.

        Args:
            tokens: ids of its committed tokens, at least one; an int array is not walked in Python.
            handle: in practice a `Continuation`.
            salt: what its content depends on beside the tokens; only a prompt with an equal salt matches it.
            frontiers: "any" if a sequence may start at any of its tokens, "end" if only behind the last one (C2.2).

        Raises:
            MisuseError: no tokens, ids of another form, a handle that is in the index already or cannot be hashed, or
                other `frontiers`.
        """
        ids = token_ids("the tokens of a continuation", tokens)
        if frontiers not in ("any", "end"):
            raise pk.MisuseError("frontiers", expected='"any" or "end"', got=pk.checks.shown(frontiers), clause="C2.2",
                                 remedy='pass "end" for a model with a state of its own')
        _require_hashable("salt", salt)
        _require_hashable("a handle", handle)
        if handle in self._entries or not ids.size:
            raise pk.MisuseError("an entry of the index", expected="at least one token, and a handle of its own",
                                 got=f"{ids.size} tokens of {pk.checks.shown(handle)}", clause="C2.2",
                                 remedy="remove the handle first, or insert what was committed")
        if len(self._entries) >= self.entries_max:
            self.skipped += 1
            return False
        with self._change():
            entry = _Entry(handle, self._node_at(ids, salt), ids.size, salt, frontiers)
            entry.node.ends.append(entry)
            self._entries[handle] = entry
            self._use(entry)
        return True

    def match(self, tokens: Iterable[int], *, salt: Hashable = None) -> PrefixMatch | None:
        """Return the continuation with the longest common prefix, or None; it counts as used now.

        Of two continuations with the same prefix, one that ends there comes first, then the one used last.
        """
        ids = token_ids("a prompt", tokens)
        _require_hashable("salt", salt)
        with self._change():
            best, length = self._longest(ids, salt)
            if best is None:
                return None
            self._use(best)
        return PrefixMatch(best.handle, length, best.length == length)

    def _longest(self, ids: Int32, salt: Hashable) -> tuple[_Entry | None, int]:
        """Return the entry with the longest common prefix, and its tokens."""
        best, length, node = None, 0, self._roots.get(salt)
        at = 0
        while node is not None:
            common = _common(node.edge, ids[at:])
            if common and node.latest is not None:
                best, length = node.latest, at + common
            if common < node.edge.size:
                break
            at += common
            ended = [entry for entry in node.ends if entry.length == at]
            if ended:
                best, length = max(ended, key=lambda entry: entry.used), at
            node = node.children.get(int(ids[at])) if at < ids.size else None
        return best, length

    def remove(self, handle: Hashable) -> None:
        """Forget a continuation; it is never offered again.

        Raises:
            MisuseError: the handle is not in the index.
        """
        _require_hashable("a handle", handle)
        if handle not in self._entries:
            raise pk.MisuseError("remove", expected="a handle in the index", got=pk.checks.shown(handle),
                                 remedy="remove each handle once", clause="C2.2")
        with self._change():
            entry = self._entries.pop(handle)
            node: _Node | None = entry.node
            assert node is not None, "an entry has a node"
            node.ends.remove(entry)
            while node is not None:
                parent = node.parent
                if parent is not None and not node.ends and not node.children:
                    del parent.children[int(node.edge[0])]
                elif node.latest is entry:
                    node.latest = _latest_of(node)
                if parent is not None and len(node.children) == 1 and not node.ends:
                    _join(node)
                elif parent is None and not node.children:
                    del self._roots[entry.salt]
                node = parent

    def touch(self, handle: Hashable) -> None:
        """Count a continuation as used now; MisuseError if it is not in the index."""
        _require_hashable("a handle", handle)
        entry = self._entries.get(handle)
        if entry is None:
            raise pk.MisuseError("touch", expected="a handle in the index", got=pk.checks.shown(handle),
                                 remedy="insert it first", clause="C2.2")
        with self._change():
            self._use(entry)

    def covered(self, handle: Hashable) -> list[Hashable]:
        """Return the continuations whose whole text is a shorter prefix of this one's: it offers all that they do.

        Continuations that resume at their end only are not covered, and cover nothing.
        """
        if self._is_changing:
            self._mend()
        entry = self._entries[handle]
        found: list[Hashable] = []
        node: _Node | None = entry.node if entry.frontiers == "any" else None
        while node is not None:
            found += [one.handle for one in node.ends if one.frontiers == "any" and one.length < entry.length]
            node = node.parent
        return found

    # ---- helpers ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Mark the tree as changing inside the block; mend one that an interrupted call left so."""
        if self._is_changing:
            self._mend()
        self._is_changing = True
        yield
        self._is_changing = False

    def _mend(self) -> None:
        """Build the tree anew from the entries, in the order of their use.  Work grows with the nodes."""
        nodes: dict[_Node, None] = {}
        roots: dict[Hashable, _Node] = {}
        for entry in self._entries.values():
            node = entry.node
            while node not in nodes:
                nodes[node] = None
                if node.parent is None:
                    roots[entry.salt] = node
                    break
                node = node.parent
        for node in nodes:
            node.children, node.ends, node.latest = {}, [], None
        for node in nodes:
            if node.parent is not None:
                node.parent.children[int(node.edge[0])] = node
        self._roots = roots
        for entry in self._entries.values():
            entry.node.ends.append(entry)
            self._note_use(entry)
        for node in nodes:
            if node.parent is not None and len(node.children) == 1 and not node.ends:
                _join(node)
        self._is_changing = False

    def _use(self, entry: _Entry) -> None:
        """Move an entry behind all others, and let every node on its way know."""
        self._entries.move_to_end(entry.handle)
        self._note_use(entry)

    def _note_use(self, entry: _Entry) -> None:
        self._uses += 1
        entry.used = self._uses
        node: _Node | None = entry.node if entry.frontiers == "any" else None
        while node is not None:
            node.latest = entry
            node = node.parent

    def _node_at(self, ids: Int32, salt: Hashable) -> _Node:
        """Return the node at which a text ends; split an edge or add one where there is none."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = _Node(None, ids[:0].copy())
        at = 0
        while at < ids.size:
            child = node.children.get(int(ids[at]))
            if child is None:
                child = node.children[int(ids[at])] = _Node(node, ids[at:].copy())
                return child
            common = _common(child.edge, ids[at:])
            if common < child.edge.size:
                child = _split(child, common)
            node, at = child, at + common
        return node


def _common(edge: Int32, ids: Int32) -> int:
    """Return how many tokens two texts have in common from their beginning."""
    count = min(edge.size, ids.size)
    if edge[:count].tobytes() == ids[:count].tobytes():
        return count
    return int((edge[:count] != ids[:count]).argmax())


def _split(node: _Node, at: int) -> _Node:
    """Cut the edge of a node behind `at` tokens, and return the new node in front of it."""
    assert node.parent is not None, "a root has no edge"
    front = _Node(node.parent, node.edge[:at].copy(), {int(node.edge[at]): node}, [], node.latest)
    node.parent.children[int(node.edge[0])] = front
    node.parent, node.edge = front, node.edge[at:].copy()
    return front


def _join(node: _Node) -> None:
    """Take a node without entries out of the tree: its edge goes to its only child."""
    assert node.parent is not None, "a root has no edge"
    (child,) = node.children.values()
    child.parent, child.edge = node.parent, np.concatenate((node.edge, child.edge))
    node.parent.children[int(node.edge[0])] = child


def _latest_of(node: _Node) -> _Entry | None:
    """Return the entry used last among those that end at a node or lie behind its children."""
    entries = [entry for entry in node.ends if entry.frontiers == "any"]
    entries += [child.latest for child in node.children.values() if child.latest is not None]
    return max(entries, key=lambda entry: entry.used, default=None)


def _require_hashable(what: str, value: object) -> None:
    pk.checks.require_hashable(what, value, remedy="pass a Continuation as handle, and text, bytes or a number as salt",
                               clause="C2.2")
