"""The model of a session: conversations, entries, documents and forks in plain dicts.

Written from the design, and knowing nothing of how the product does it. A `State` is what one
commit leaves; states share what did not change and are never written to afterwards, so that the
past is kept by keeping them: what a document was at an entry is a lookup in the state of that
entry's commit.
"""

from __future__ import annotations

from typing import Any

import attrs
from history_documents import BY_NAME, migrated

Address = tuple[str, int, str]
"""Name, the id of what the document belongs to (0 for the session), and key."""


@attrs.frozen(eq=False)
class Doc:
    """A living document: the version of its last write, and the JSON of it. Never changed.

    Two of them are the same only if they are one object: each commit that changes makes a new one.
    """

    version: int
    value: Any
    life: int
    """Which incarnation it is: a new number whenever a document is made."""
    _shapes: dict[int, Any] = attrs.field(factory=dict, init=False, repr=False)

    def shape(self, version: int) -> Any:
        """The value as code of a version sees it; not to be changed."""
        if version not in self._shapes:
            self._shapes[version] = migrated(self.value, self.version, version)
        return self._shapes[version]


@attrs.frozen
class Line:
    """One entry."""

    id: int
    conversation: int
    seq: int
    messages: tuple[Any, ...]
    """The product's own records: they are handed in, and must be handed out the same."""
    data: Any
    head: int | None
    edits: tuple[tuple[int, tuple[Any, ...] | None], ...]
    by_task: int | None = None


@attrs.frozen
class Place:
    """One conversation."""

    id: int
    parent: int | None = None
    parent_entry: int | None = None
    entries: tuple[int, ...] = ()
    owner: int | None = None
    """The task that made it, if one did."""
    principal: str = ""
    now: bool = False
    """Whether the fork was made of now, and not of an entry."""


@attrs.define
class State:
    """What a commit leaves. `grow` makes the next one, which may be written to until it is kept."""

    seq: int = 0
    places: dict[int, Place] = attrs.Factory(dict)
    lines: dict[int, Line] = attrs.Factory(dict)
    docs: dict[Address, Doc] = attrs.Factory(dict)
    blobs: dict[str, bytes] = attrs.Factory(dict)
    tasks: dict[int, bool] = attrs.Factory(dict)
    """Whether a task is live, by id."""
    writers: dict[int, int] = attrs.Factory(dict)
    """By incarnation: the version of the class that wrote it last, also if a fork copied the past
    of it, which an older class had written."""

    def grow(self, seq: int) -> State:
        return State(
            seq,
            self.places.copy(),
            self.lines.copy(),
            self.docs.copy(),
            self.blobs.copy(),
            self.tasks.copy(),
            self.writers.copy(),
        )

    # --- reading ---------------------------------------------------------------------------

    def history(self, conversation: int) -> list[Line]:
        """Own entries after the parent's history through the fork point."""
        place = self.places[conversation]
        own = [self.lines[id] for id in place.entries]
        if place.parent is None:
            return own
        if place.parent_entry is None:
            return own
        through: list[Line] = []
        for line in self.history(place.parent):
            through.append(line)
            if line.id == place.parent_entry:
                break
        return [*through, *own]

    def shown(self, address: Address, version: int) -> Any:
        """The value of a document in the shape of a version; None where there is none.

        It belongs to the model: copy it before you change it.
        """
        doc = self.docs.get(address)
        return None if doc is None else doc.shape(version)

    def too_new(self, address: Address, version: int) -> bool:
        doc = self.docs.get(address)
        return doc is not None and doc.version > version

    # --- changing, before it is kept ---------------------------------------------------------

    def put(self, address: Address, version: int, value: Any, life: int) -> None:
        """Write a document with the code of a version; one that is new is a new life."""
        old = self.docs.get(address)
        self.docs[address] = made = Doc(version, value, life if old is None else old.life)
        self.writers[made.life] = version

    def copy(self, address: Address, doc: Doc, life: int) -> None:
        """Let a fork begin with a document of its parent."""
        self.docs[address] = attrs.evolve(doc, life=life)
        self.writers[life] = self.writers[doc.life]

    def policy(self, name: str, doc: Doc) -> str:
        """What a fork does with a document: what the class says that wrote it last."""
        return BY_NAME[name].forks[self.writers[doc.life] - 1]

    def append(self, line: Line) -> None:
        place = self.places[line.conversation]
        self.lines[line.id] = line
        self.places[place.id] = attrs.evolve(place, entries=(*place.entries, line.id))

    def fork(self, made: int, parent: int, at: int | None, owner: int | None) -> None:
        """Fork at an entry of the parent's history, or as of now where `at` is None."""
        now = at is None
        if now:
            history = self.history(parent)
            at = history[-1].id if history else None
        principal = self.places[parent].principal
        self.places[made] = Place(made, parent, at, owner=owner, principal=principal, now=now)

    def inherited(self, address: Address, past: Past) -> Doc | None:
        """What a document of a fork begins with.

        The policy of what stands there now decides; where nothing does, of what stood there then.
        """
        name, made, key = address
        place = self.places[made]
        assert place.parent is not None
        living = self.docs.get((name, place.parent, key))
        policy = None if living is None else self.policy(name, living)
        if policy == "current" or (policy == "as_of" and place.now):
            return living
        if policy == "initial" or place.now:
            return None
        assert place.parent_entry is not None
        home = self.lines[place.parent_entry].conversation
        then = past.at(self, place.parent_entry).docs.get((name, home, key))
        if then is not None and policy is None and self.policy(name, then) != "as_of":
            return None
        return then


@attrs.define
class Past:
    """Every state that was published or is staged, by the sequence number of its commit."""

    states: dict[int, State] = attrs.Factory(dict)

    def at(self, now: State, entry: int) -> State:
        """The state that the commit of an entry left; `now`, if that commit is being made."""
        return self.states.get(now.lines[entry].seq, now)


@attrs.define
class Model:
    """The published state, what is staged over it, and the past."""

    published: State = attrs.Factory(State)
    staged: list[State] = attrs.Factory(list)
    past: Past = attrs.Factory(Past)
    lives: int = 0

    @property
    def newest(self) -> State:
        """What a body sees: what the bodies before it have staged."""
        return self.staged[-1] if self.staged else self.published

    def new_life(self) -> int:
        self.lives += 1
        return self.lives

    def begin(self, seq: int) -> State:
        return self.newest.grow(seq)

    def stage(self, state: State) -> None:
        self.staged.append(state)
        self.past.states[state.seq] = state

    def publish(self, seq: int) -> tuple[State, State] | None:
        """Adopt the staged commit of this sequence number; give the states before and after it."""
        if not self.staged or self.staged[0].seq != seq:
            return None
        before, after = self.published, self.staged.pop(0)
        self.published = after
        return before, after

    def revert(self) -> None:
        for state in self.staged:
            self.past.states.pop(state.seq, None)
        self.staged.clear()
