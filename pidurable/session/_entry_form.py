"""An entry as it will be stored: checked and encoded once, appended now or later.

What waits in an inbox is kept as JSON in the same form, so that it is refused where it was handed
in and not where it is placed, and is placed as it was checked, also under smaller limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

from pidurable.errors import InvalidArgumentError, show
from pidurable.records import _codec, _json
from pidurable.records._checks import check_name
from pidurable.records._entries import Edit, entry_kind
from pidurable.records._messages import Message

if TYPE_CHECKING:
    from pidurable.session._session import Session

T = TypeVar("T")


@final
class EncodedEntry(NamedTuple):
    """The parts of an entry, as texts and as they will be read."""

    kind: str
    data_text: str | None
    messages_text: str | None
    messages: tuple[Message, ...]
    edits_text: str | None
    edits: tuple[Edit, ...]
    head: int | None
    """As given: 0 is the entry itself."""

    @property
    def is_visible(self) -> bool:
        """Whether any request can tell that the entry is there."""
        return bool(self.messages or self.edits) or self.head is not None

    def json(self) -> dict[str, Any]:
        """The same as one value, for `decode_entry`."""
        return {
            "kind": self.kind,
            "data": _loaded(self.data_text),
            "messages": _loaded(self.messages_text) or [],
            "head": self.head,
            "edits": _loaded(self.edits_text) or [],
        }


def plain_entry(kind: str, data_text: str) -> EncodedEntry:
    """An entry that no model sees, of data that is encoded already; nothing is checked again."""
    return EncodedEntry(
        kind=kind,
        data_text=data_text,
        messages_text=None,
        messages=(),
        edits_text=None,
        edits=(),
        head=None,
    )


def encode_entry(
    session: Session,
    value: object,
    *,
    kind: str | None,
    messages: Sequence[Message],
    head: int | None,
    edits: Sequence[Edit],
) -> EncodedEntry:
    """Encode the parts of an entry, or say what is wrong with them; looks at no other record.

    Raises:
        InvalidArgumentError: A part is not what it is to be.
        NotJsonError: A value cannot be stored; the path says which.
    """
    kind = entry_kind(value) if kind is None else check_name(kind, "kind")
    limit = session.settings.value_bytes_max
    data_text = (
        None
        if value is None
        else session.codec.encode_text(
            value, path=f"$<{kind}>", bytes_max=limit, setting="value_bytes_max"
        )
    )
    messages_text = None
    # An iterator can be walked once, and is always true.
    messages, edits = _listed("messages", messages), _listed("edits", edits)
    if messages:
        encoded = _codec.encode_messages(messages, path="$.messages")
        read = _codec.as_read(messages, limit)
        messages_text = _json.dumps(
            encoded,
            path="$.messages",
            bytes_max=limit,
            setting="value_bytes_max",
            checked=read is not None,
        )
        # Read as it will be: what could be written but not read again is refused here.
        messages = read or _codec.decode_messages(
            _json.loads_stored(messages_text), path="$.messages"
        )
    edits_text = None
    if edits:
        for place, edit in enumerate(edits):
            if not isinstance(edit, Edit):
                raise InvalidArgumentError(
                    f"edits[{place}]", "expected an Edit, as in Edit(target=id)", show(edit)
                )
        encoded = _codec.encode_edits(edits, path="$.edits")
        edits_text = _json.dumps(
            encoded, path="$.edits", bytes_max=limit, setting="value_bytes_max"
        )
        edits = _codec.decode_edits(_json.loads_stored(edits_text), path="$.edits")
    return EncodedEntry(
        kind=kind,
        data_text=data_text,
        messages_text=messages_text,
        messages=tuple(messages),
        edits_text=edits_text,
        edits=tuple(edits),
        head=head,
    )


def decode_entry(value: dict[str, Any]) -> EncodedEntry:
    """The entry that `EncodedEntry.json` gave, from what was stored of it."""
    messages, edits, data = value["messages"], value["edits"], value["data"]
    return EncodedEntry(
        kind=value["kind"],
        data_text=None if data is None else _json.dumps(data),
        messages_text=_json.dumps(messages) if messages else None,
        messages=tuple(_codec.decode_messages(messages)) if messages else (),
        edits_text=_json.dumps(edits) if edits else None,
        edits=tuple(_codec.decode_edits(edits)) if edits else (),
        head=value["head"],
    )


def _loaded(text: str | None) -> Any:
    return None if text is None else _json.loads_stored(text)


def _listed(name: str, given: Iterable[T]) -> tuple[T, ...]:
    """What a caller gave as a list."""
    # A list and a tuple are looked at first: to ask for any `Iterable` takes longer than all of it.
    if type(given) not in (list, tuple) and not isinstance(given, Iterable):
        raise InvalidArgumentError(name, "expected a list", show(given))
    return tuple(given)
