"""Where did the last tokens stand before? The longest earlier match and its latest places, in time that no store grows.

A position of the text that has been inserted is an *occurrence* of every context (tokens before it) of up to
``max_depth`` tokens. The tree is read from the nearest token backwards, so contexts that end alike share a path::

    text   a b x  c b y  a b ?         root --b--+--a--> 2           context "a b": the longest that occurred
              2      5                           `--c--> 5           before; it stood at 2, where x follows

Only contexts that differ have a node (a suffix tree of the reversed text, cut at ``max_depth``), so the tree has fewer
inner nodes than occurrences. A node keeps its ``max_recent`` latest occurrences: what followed them is read in
the text, which makes continuation counts of any length without storing one.

Why not a suffix automaton: it needs up to two states with a dictionary each for every token, counts on it cost a walk
of the suffix links for each token (as long as the text, if that is a loop), and the oldest tokens cannot be taken out.
Here a lookup, an insertion and a removal are each one walk of at most ``max_depth`` nodes; on running text it is three
to five.
"""

from __future__ import annotations

# Bytes in CPython, for the estimate of memory; a test holds them against what the allocator says.
BYTES_PER_TEXT_ENTRY = 9  # a list's, with the room that lists keep
_BYTES_PER_OCCURRENCE = 32  # the token
_BYTES_PER_LEAF = 32 + 24  # the position, and its share of a large dictionary
_BYTES_PER_NODE = 56 + 224 + 60  # the node, a small dictionary, a tuple of two or three positions

MAX_BYTES_PER_OCCURRENCE = (
    _BYTES_PER_OCCURRENCE + _BYTES_PER_LEAF + _BYTES_PER_NODE
)  # at most one of each comes with it


class _Node:
    """A context of ``depth`` tokens that occurred at least twice, after different tokens (or as long as they get)."""

    __slots__ = ("children", "depth", "recent")

    def __init__(self, depth: int, recent: tuple[int, ...], children: dict[int, _Node | int]) -> None:
        self.depth = depth
        self.recent = recent  # the latest occurrences, the newest last
        self.children = children  # by the next token to the left; an int is the only occurrence of its context


class ContextTree:
    """Occurrences in ``text``, which the owner fills and which must not change where it has been inserted.

    Every stretch of the text that is a text of its own must follow a negative number that stands nowhere else, the
    first one included: no context reaches beyond it. ``remove`` takes occurrences in the order in which they were
    inserted. Raises ValueError unless ``max_depth >= 1`` and ``max_recent >= 2``.
    """

    def __init__(self, *, max_depth: int = 32, max_recent: int = 8) -> None:
        if max_depth < 1 or max_recent < 2:
            raise ValueError(
                f"a context tree needs max_depth >= 1 and max_recent >= 2, got {max_depth} and {max_recent}"
            )
        self.text: list[int] = []
        self.num_occurrences = 0
        self.num_leaves = 0  # occurrences that alone have their context
        self.num_nodes = 0
        self._max_depth = max_depth
        self._kept = 1 - max_recent  # of the recent ones when another comes: recent[kept:]
        self._root = _Node(0, (), {})

    @property
    def memory_bytes(self) -> int:
        """Estimate of what text and tree hold."""
        return (
            len(self.text) * BYTES_PER_TEXT_ENTRY
            + self.num_occurrences * _BYTES_PER_OCCURRENCE
            + self.num_leaves * _BYTES_PER_LEAF
            + self.num_nodes * _BYTES_PER_NODE
        )

    def insert(self, position: int) -> None:
        """``text[position]`` follows the tokens before it, from now on. At most ``max_depth`` nodes are visited."""
        text, last = self.text, position - 1
        self.num_occurrences += 1
        node, depth = self._root, 0
        while True:
            children = node.children
            token = text[last - depth]
            child = children.get(token)
            if child is None:
                children[token] = position
                self.num_leaves += 1
                return
            if isinstance(child, int):
                self.num_leaves -= 1
                agreed = _agreement(text, child - 1, text, last, depth + 1, self._max_depth)
                children[token] = self._fork(agreed, child, (child,), child, position)
                return
            below = child.depth
            if below > depth + 1:
                other = child.recent[-1] - 1
                if text[other - below + 1 : other - depth] != text[last - below + 1 : last - depth]:
                    agreed = _agreement(text, other, text, last, depth + 1, below)
                    children[token] = self._fork(agreed, child, child.recent, other + 1, position)
                    return
            child.recent = (*child.recent[self._kept :], position)
            if below == self._max_depth:
                return
            node, depth = child, below

    def remove(self, position: int) -> None:
        """Take out the oldest occurrence. At most ``max_depth`` nodes are visited."""
        text, last = self.text, position - 1
        self.num_occurrences -= 1
        parent = node = self._root
        while True:
            children = node.children
            token = text[last - node.depth]
            child = children[token]
            if isinstance(child, int):
                assert child == position, (child, position)
                del children[token]
                self.num_leaves -= 1
                if len(children) == 1 and node is not self._root:  # both contexts have become one
                    parent.children[text[last - parent.depth]] = next(iter(children.values()))
                    self.num_nodes -= 1
                return
            if child.recent[0] == position:
                child.recent = child.recent[1:]
            if child.depth == self._max_depth:
                if len(child.recent) == 1:
                    children[token] = child.recent[0]
                    self.num_nodes -= 1
                    self.num_leaves += 1
                return
            parent, node = node, child

    def find(self, text: list[int], end: int) -> tuple[int, tuple[int, ...]]:
        """How many of the tokens before ``text[end]`` occurred before, up to ``max_depth``, and where last.

        ``text`` may be another tree's, under the same rules, but its negative numbers must differ from this one's.
        Returns the length of the longest match and the latest occurrences of exactly these tokens, the newest last;
        (0, ()) without a match. At most ``max_depth`` nodes are visited.
        """
        mine, last = self.text, end - 1
        node, depth = self._root, 0
        while True:
            child = node.children.get(text[last - depth])
            if child is None:
                return depth, node.recent
            if isinstance(child, int):
                return _agreement(mine, child - 1, text, last, depth + 1, self._max_depth), (child,)
            below = child.depth
            if below > depth + 1:
                other = child.recent[-1] - 1
                if mine[other - below + 1 : other - depth] != text[last - below + 1 : last - depth]:
                    return _agreement(mine, other, text, last, depth + 1, below), child.recent
            if below == self._max_depth:
                return below, child.recent
            node, depth = child, below

    def _fork(self, depth: int, child: _Node | int, recent: tuple[int, ...], other: int, position: int) -> _Node:
        """A new node where the contexts of ``child`` (one of which stands at ``other``) and of ``position`` part."""
        children: dict[int, _Node | int] = {}
        self.num_nodes += 1
        if depth < self._max_depth:
            self.num_leaves += 1 + isinstance(child, int)
            text = self.text
            children[text[other - 1 - depth]] = child
            children[text[position - 1 - depth]] = position
        return _Node(depth, (*recent[self._kept :], position), children)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree's counts and shape hold."""
        nodes = leaves = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            for token, child in node.children.items():
                at = child if isinstance(child, int) else child.recent[-1]
                assert self.text[at - 1 - node.depth] == token, (node.depth, token, at)
                if isinstance(child, int):
                    leaves += 1
                    continue
                nodes += 1
                stack.append(child)
                assert node.depth < child.depth <= self._max_depth, (node.depth, child.depth)
                assert 2 <= len(child.recent) <= 1 - self._kept, (child.depth, child.recent)
                if child.depth == self._max_depth:
                    assert not child.children, child.children
                else:
                    assert len(child.children) >= 2, (child.depth, child.children)
        assert (nodes, leaves) == (self.num_nodes, self.num_leaves), (nodes, leaves, self.num_nodes, self.num_leaves)
        assert max(nodes, leaves) <= self.num_occurrences, (nodes, leaves, self.num_occurrences)


def _agreement(mine: list[int], other: int, text: list[int], last: int, known: int, limit: int) -> int:
    """How many tokens agree backwards from ``mine[other]`` and ``text[last]``, up to ``limit``; ``known`` surely do."""
    while known < limit and mine[other - known] == text[last - known]:
        known += 1
    return known
