"""What a commit of a history does: each action on a transaction of the product, and on the model.

The transaction tells the ids that it draws; everything else that a commit leaves the model works
out alone. What the design leaves open (a draft that is changed again after a patch of the
same document) is not done.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import attrs
from history_documents import (
    AGENT,
    AGENT_FIELDS,
    ALL_KINDS,
    BY_NAME,
    FAMILY_KEYS,
    KINDS,
    VERSIONS,
    Kind,
    body_name,
    initial,
    log_of,
    log_pointer,
)
from history_model import Address, Line, Model, Place, State
from history_values import changed, drawn, patched, pointers, same

from pidurable.errors import DocumentTooNewError, NotFoundError
from pidurable.records._entries import Edit
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    ImageBlock,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)

TOOLS = ("look", "write", "ask")
BLOB_BYTES_MIN = 64 * 1024
"""Limits: from here on the bytes move to a blob by themselves."""
STATUSES = ("complete", "complete", "complete", "aborted", "failed", "deferred")
WORDS = ("hello", "and then?", "fine", " ", "", "é ü 漢", "\n\t")


class HistoryError(AssertionError):
    """The product did not do as the model expects; the text says where and what."""


class BoomError(Exception):
    """Raised in a body on purpose."""


@attrs.define
class Body:
    """One body: the transaction of the product beside the state that the model makes of it."""

    tx: Any
    model: Model
    state: State
    versions: dict[str, int]
    """Of the code that runs now, by document name."""
    rare: Counter[str]
    last_id: Callable[[int], None]
    """Told of each id, to see that they rise."""
    by_task: int | None = None
    """The task whose commit it is."""
    homes: dict[int, int] = attrs.Factory(dict)
    """The conversations that tasks live in."""
    drafts: dict[Address, tuple[int, Any, Any]] = attrs.Factory(dict)
    """The version, the draft, and what the model's copy of it holds."""
    patched: set[Address] = attrs.Factory(set)
    unsettled: set[Address] = attrs.Factory(set)
    """Documents of forks of this commit that nobody has looked at: they are copied at its end."""
    before: State = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.before = self.model.newest

    async def do(self, action: list[Any]) -> None:
        if self.state.places or action[0] == "new":
            await getattr(self, f"_{action[0]}")(*action[1:])

    def _place(self, number: int) -> int:
        return list(self.state.places)[number % len(self.state.places)]

    # --- transcripts -----------------------------------------------------------------------

    async def _new(self) -> None:
        principal = "" if self.by_task else f"person {len(self.state.places) % 3}"
        if self.by_task:
            made = self.tx.create_conversation()
        else:
            made = self.tx.create_conversation(principal=principal)
        self.last_id(made)
        if self.by_task:
            home = self.state.places[self.homes[self.by_task]]
            principal = home.principal
        self.state.places[made] = Place(made, owner=self.by_task, principal=principal)

    async def _append(self, conversation: int, head: int, shape: int, seed: int) -> None:
        self.append(self._place(conversation), shape, Random(seed), head=head)

    async def _edit(self, conversation: int, many: int, seed: int) -> None:
        random = Random(seed)
        place = self._place(conversation)
        history = self.state.history(place)
        edits = []
        for _ in range(min(many + 1, len(history))):
            # Mostly of what was just said, so that targets are edited more than once.
            line = random.choice(history[-6:] if random.random() < 0.8 else history)
            kind = random.randrange(4)
            messages = None
            if kind:
                # One answer in an entry: the calls of a second would have no name.
                first = self.message(place, random.randrange(4), random)
                more = self.message(place, random.choice((0, 2, 3)), random)
                messages = ((), (first,), (first, more))[kind - 1]
            edits.append(Edit(target=line.id, messages=messages))
            if line.conversation != place:
                self.rare["edit of an ancestor's entry"] += 1
        self.append(place, 8, random, edits=_once(edits))

    def append(
        self,
        conversation: int,
        shape: int,
        random: Random,
        *,
        head: int = 0,
        messages: tuple[Message, ...] | None = None,
        edits: tuple[Edit, ...] = (),
    ) -> int:
        """Append an entry of a shape; numbers of `head` above 9 give it one."""
        history = self.state.history(conversation)
        target: int | None = None
        if head == 10:
            target = 0
        elif head > 10 and history:
            line = random.choice(history)
            target = line.id
            if line.conversation != conversation:
                self.rare["head in an ancestor"] += 1
        if messages is None:
            messages = self.messages(conversation, shape, random)
        data: Any = {"n": random.randint(0, 99)} if random.random() < 0.5 else None
        if random.random() < 0.01:
            data = random.choice("ab") * BLOB_BYTES_MIN
            self.rare["entry that is kept in a blob"] += 1
        made = self.tx.append(
            conversation,
            data,
            kind="histories.line",
            messages=messages,
            head=target,
            edits=edits,
        )
        self.last_id(made)
        self.state.append(
            Line(
                id=made,
                conversation=conversation,
                seq=self.tx.seq,
                messages=messages,
                data=data,
                head=made if target == 0 else target,
                edits=tuple((edit.target, edit.messages) for edit in edits),
                by_task=self.by_task,
            )
        )
        return made

    def messages(self, conversation: int, shape: int, random: Random) -> tuple[Message, ...]:
        if shape >= 8:
            return ()
        if shape == 7:
            return tuple(self.message(conversation, random.choice((0, 2, 3)), random) for _ in "ab")
        return (self.message(conversation, (0, 0, 1, 1, 2, 2, 3)[shape], random),)

    def message(self, conversation: int, kind: int, random: Random) -> Message:
        if kind == 0:
            return UserMessage(blocks=self.blocks(random), at_us=1)
        if kind == 1:
            return answer(
                _texts(random),
                [random.choice(TOOLS) for _ in range(random.choice((0, 1, 1, 2, 3)))],
                status=random.choice(STATUSES),
                thinks=random.random() < 0.2,
            )
        if kind == 2:
            called = [
                (line.id, index)
                for line in self.state.history(conversation)
                for message in line.messages
                if isinstance(message, AssistantMessage)
                for index in range(len(message.tool_calls))
            ]
            place = (random.randint(1, 40), random.randint(0, 2))
            if called and random.random() < 0.8:
                place = random.choice(called[-6:])
            return result(place, self.blocks(random), is_error=random.random() < 0.2)
        sections = {random.choice("ab"): random.choice((None, *WORDS))}
        return SystemMessage(sections=sections, at_us=1)

    def blocks(self, random: Random) -> tuple[Block, ...]:
        """What somebody or a tool says; now and then with an image, new or known."""
        texts = _texts(random)
        if random.random() > 0.06:
            return texts
        known = list(self.state.blobs)
        if known and random.random() < 0.5:
            name = random.choice(known)
            self.rare["image that was stored before"] += 1
        else:
            data = bytes(random.randbytes(random.choice((1, 9, 3_000))))
            name = self.tx.put_blob(data)
            if name != hashlib.sha256(data).hexdigest():
                raise HistoryError(f"a blob is called {name}, which is not its digest")
            self.state.blobs[name] = data
            self.rare["image stored with its message"] += 1
        return (*texts, ImageBlock(blob=name, media_type="image/png"))

    def stranger(self, conversation: int, random: Random) -> int | None:
        """An entry that is not in a history: of another conversation, or beyond a fork point."""
        inside = {line.id for line in self.state.history(conversation)}
        others = [id for id in self.state.lines if id not in inside]
        return random.choice(others) if others else None

    async def _stranger(self, conversation: int, seed: int) -> None:
        """What names an entry that is not in the history is refused where it is said."""
        random, place = Random(seed), self._place(conversation)
        other = self.stranger(place, random)
        if other is None:
            return
        tries: tuple[Callable[[], object], ...] = (
            lambda: self.tx.append(place, kind="histories.line", head=other),
            lambda: self.tx.append(place, kind="histories.line", edits=(Edit(target=other),)),
            lambda: self.tx.fork(place, other),
        )
        number = random.randrange(len(tries))
        try:
            tries[number]()
        except NotFoundError:
            self.rare[f"refused to {('head to', 'edit', 'fork at')[number]} a stranger"] += 1
            return
        raise HistoryError(f"conversation {place} was let to name entry {other} of another history")

    # --- forks -----------------------------------------------------------------------------

    async def _fork(self, conversation: int, entry: int) -> None:
        place = self._place(conversation)
        history = self.state.history(place)
        at = None
        if history and entry % 4:
            at = history[entry // 4 % len(history)].id
        self.fork(place, at)

    async def _fork_here(self, conversation: int, seed: int) -> None:
        place = self._place(conversation)
        made = self.append(place, seed % 8, Random(seed))
        self.fork(place, made)
        self.rare["fork at an entry of its own commit"] += 1

    def fork(self, place: int, at: int | None) -> None:
        made = self.tx.fork(place, at)
        self.last_id(made)
        self._count_fork(place, at)
        self.state.fork(made, place, at, self.by_task)
        for kind in ALL_KINDS:
            if kind.scope == "conversation":
                keys = FAMILY_KEYS if kind.family else ("",)
                self.unsettled |= {(kind.name, made, key) for key in keys}

    def settle(self, address: Address) -> None:
        """Copy a document of a fork that was made in this body, if that is not done yet."""
        if address not in self.unsettled:
            return
        self.unsettled.discard(address)
        name, made, key = address
        parent = self.state.places[made].parent
        assert parent is not None
        self.settle((name, parent, key))
        doc = self.state.inherited(address, self.model.past)
        if doc is not None:
            self.rare[f"copied by a fork: {self.state.policy(name, doc)}"] += 1
            self.state.copy(address, doc, self.model.new_life())

    def finish(self) -> bool:
        """The end of the body: copy what others begin with. Say whether anything is stored."""
        for address in sorted(self.unsettled, key=lambda each: (each[1], each)):
            self.settle(address)
        state, before = self.state, self.before
        for id in sorted(state.places.keys() - before.places.keys()):
            self._copy_agent(state.places[id])
        grown = len(state.lines) + len(state.places) > len(before.lines) + len(before.places)
        return grown or state.docs != before.docs

    def _copy_agent(self, made: Place) -> None:
        """What a task makes begins with the agent of the task's conversation; forks have theirs."""
        if made.owner is None or made.parent is not None:
            return
        address = (AGENT.name, made.id, "")
        above = self.state.docs.get((AGENT.name, self.homes[made.owner], ""))
        if above is not None and address not in self.state.docs:
            self.rare["agent copied from the owner"] += 1
            self.state.copy(address, above, self.model.new_life())

    def _count_fork(self, place: int, at: int | None) -> None:
        state, rare = self.state, self.rare
        rare["fork"] += 1
        if state.places[place].parent is not None:
            rare["fork of a fork"] += 1
        if at is None:
            return
        if state.lines[at].conversation != place:
            rare["fork at an ancestor's entry"] += 1
        through = [line for line in state.history(place) if line.id <= at]
        calls = [
            (line.id, index)
            for line in through
            for message in line.messages
            if isinstance(message, AssistantMessage) and message.status == "complete"
            for index in range(len(message.tool_calls))
        ]
        given = {
            message.call
            for line in through
            for message in line.messages
            if isinstance(message, ToolResultMessage)
        }
        if any(call not in given for call in calls):
            rare["fork inside a round"] += 1

    # --- documents -------------------------------------------------------------------------

    async def _agent(self, conversation: int, seed: int) -> None:
        """Change one of the product's own documents, which the view of a conversation shows."""
        address = (AGENT.name, self._place(conversation), "")
        self.settle(address)
        draft = await self.tx.document(AGENT.classes[0], address[1])
        text = f"instructions {seed % 5}"
        draft.instructions = text
        old = self.state.docs.get(address)
        value = dict.fromkeys(AGENT_FIELDS) if old is None else old.value
        self._keep(address, 1, {**value, "instructions": text})

    async def _doc(self, kind: int, owner: int, key: int, back: int, how: int, seed: int) -> None:
        found = KINDS[kind % len(KINDS)]
        address = self.address(found, owner, key)
        if address is None:
            return
        version = max(1, self.versions[found.name] - max(0, back - 5))
        await self.write(found, address, version, how, Random(seed))

    def address(self, kind: Kind, owner: int, key: int) -> Address | None:
        owners = [0]
        if kind.scope == "conversation":
            owners = list(self.state.places)
        elif kind.scope == "task":
            owners = [id for id, live in self.state.tasks.items() if live]
        if not owners:
            return None
        found = owners[owner % len(owners)]
        return (kind.name, found, FAMILY_KEYS[key % 2] if kind.family else "")

    async def write(
        self, kind: Kind, address: Address, version: int, how: int, random: Random
    ) -> None:
        """Change a document in one of the ways that there are."""
        self.settle(address)
        if address in self.drafts:
            version = self.drafts[address][0]
        cls = kind.classes[version - 1]
        _, owner, key = address
        scope_id = owner or None
        if self.state.too_new(address, version):
            self.rare["refused as too new"] += 1
            try:
                await self.tx.document(cls, scope_id, key=key)
            except DocumentTooNewError:
                return
            raise HistoryError(f"a document {address} of a newer version was given to older code")
        there = address in self.state.docs
        if there and self.state.docs[address].version < version:
            self.rare["read through a migration"] += 1
        if address in self.patched or (how in (3, 4, 5) and there):
            self._patch(kind, address, version, how, random)
            return
        if address not in self.drafts:
            draft = await self.tx.document(cls, scope_id, key=key)
            value = self.state.shown(address, version)
            value = initial(version) if value is None else copy.deepcopy(value)
            self.drafts[address] = (version, draft, value)
        version, draft, value = self.drafts[address]
        if how != 6:
            self._mutate(draft, value, version, how, random)
        self._keep(address, version, value)

    def _mutate(self, draft: Any, value: Any, version: int, how: int, random: Random) -> None:
        """Change a draft, and the model's copy of it in the same way."""
        name = body_name(version)
        if how == 1 and value[name]:
            # In place, below the draft.
            item = drawn(random, 1)
            for body in (getattr(draft, name), value[name]):
                if isinstance(body, list):
                    body.append(copy.deepcopy(item))
                elif isinstance(body, dict):
                    body["new"] = copy.deepcopy(item)
        elif how == 2:
            text = f"line {random.randint(0, 99)}"
            log_of(attrs.asdict(draft, recurse=False), version).append(text)
            log_of(value, version).append(text)
        else:
            value[name] = changed(value[name], random)
            setattr(draft, name, copy.deepcopy(value[name]))

    def _patch(self, kind: Kind, address: Address, version: int, how: int, random: Random) -> None:
        self.patched.add(address)
        value = self.state.shown(address, version)
        name, log = body_name(version), log_pointer(version)
        _, owner, key = address
        cls = kind.classes[version - 1]
        lines = log_of(value, version)
        if how == 4 and lines:
            text = random.choice((" grew", "é", "\U0001f642", "x" * 90))
            at = f"{log}/{random.randrange(len(lines))}"
            self.tx.append_text(cls, owner or None, at, text, key=key)
            self._keep(
                address, version, patched(value, [{"op": "append", "path": at, "value": text}])
            )
            return
        ops: list[Any] = [{"op": "add", "path": f"{log}/-", "value": f"op {random.random()}"}]
        below = [f"/{name}{each}" for each in pointers(value[name])]
        target = random.choice(below)
        if how == 5:
            moved = f"{log}/{random.randrange(len(lines) + 1)}"
            ops += [
                {"op": "copy", "from": moved, "path": f"{log}/0"},
                {"op": "replace", "path": target, "value": drawn(random, 1)},
                {"op": "move", "from": f"{log}/0", "path": f"{log}/-"},
            ]
            if len(lines) > 6:
                ops += [{"op": "remove", "path": f"{log}/1"}] * 5
        elif target == f"/{name}":
            ops.append({"op": "replace", "path": target, "value": drawn(random)})
        else:
            how_many = random.randrange(2)
            ops.append(
                {"op": "remove", "path": target}
                if how_many
                else {"op": "replace", "path": target, "value": drawn(random, 1)}
            )
        after = patched(value, ops)
        self.tx.patch(cls, owner or None, ops, key=key)
        self._keep(address, version, after)

    def _keep(self, address: Address, version: int, value: Any) -> None:
        """Let the model's document be this, if that is a change."""
        old = self.state.shown(address, version)
        if old is not None and same(old, value):
            return
        stands = self.state.docs.get(address)
        first = self.before.docs.get(address)
        if (
            first is not None
            and stands is not None
            and stands.life == first.life
            and first.version <= version
            and same(first.shape(version), value)
        ):
            # Changed back within the commit: nothing is stored.
            self.state.docs[address] = first
            return
        if stands is not None and stands.version < version:
            self.rare["stored in a newer version"] += 1
        self.state.put(address, version, copy.deepcopy(value), self.model.new_life())

    async def _retire(self, number: int) -> None:
        found = [address for address in self.state.docs if address[0] != AGENT.name]
        if found:
            self.retire(found[number % len(found)])

    async def _renew(self, number: int, seed: int) -> None:
        found = [a for a in self.before.docs if a in self.state.docs and a[0] != AGENT.name]
        if not found:
            return
        address = found[number % len(found)]
        self.retire(address)
        kind = BY_NAME[address[0]]
        await self.write(kind, address, self.versions[kind.name], 0, Random(seed))
        self.rare["retired and made again in one commit"] += 1

    def retire(self, address: Address) -> None:
        name, owner, key = address
        kind = BY_NAME[name]
        version = self.versions[name]
        self.settle(address)
        self.tx.retire(kind.classes[min(version, VERSIONS) - 1], owner or None, key=key)
        del self.state.docs[address]
        self.drafts.pop(address, None)
        self.patched.discard(address)
        self.rare["retired"] += 1


def _once(edits: list[Edit]) -> tuple[Edit, ...]:
    """At most one edit of each target: which of two in one entry wins is not said."""
    return tuple({edit.target: edit for edit in edits}.values())


def _texts(random: Random) -> tuple[Block, ...]:
    return tuple(TextBlock(text=random.choice(WORDS)) for _ in range(random.choice((1, 1, 2))))


def answer(
    blocks: tuple[Block, ...], calls: list[str], *, status: Any = "complete", thinks: bool = False
) -> AssistantMessage:
    thoughts: tuple[Block, ...] = (ThinkingBlock(text="hm"),) if thinks else ()
    asked = tuple(ToolCallBlock(name=name, arguments={}) for name in calls)
    return AssistantMessage(
        blocks=(*thoughts, *blocks, *asked),
        status=status,
        stop_reason="stop",
        model="scripted/model",
        usage=Usage(),
        at_us=1,
    )


def result(
    call: tuple[int, int], blocks: tuple[Block, ...], *, is_error: bool = False
) -> ToolResultMessage:
    return ToolResultMessage(
        call=call, name="look", blocks=blocks, is_error=is_error, at_us=1, code=None
    )
