"""Permission requests as they are stored: found without a session, by their ids or by who waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pidurable.agent._permission_records import (
    PERMISSION,
    PermissionRequest,
    request_of,
)
from pidurable.errors import (
    NotJsonError,
    StorageCorruptError,
)
from pidurable.records import _codec, _json
from pidurable.records._checks import is_id
from pidurable.session import _documents
from pidurable.session._documents import Address
from pidurable.storage import DocumentRow, RecordKind, Storage

_WAITS_PAGE: Final = 10_000


def stored_address(storage: Storage, request_id: object) -> Address | None:
    """Where a request lies, by its id, which is the id of its document; None if there is none."""
    if not is_id(request_id):
        return None
    assert isinstance(request_id, int)
    rows = storage.scan(RecordKind.DOCUMENT, after=(request_id - 1,), limit=1)
    row = DocumentRow(*rows[0]) if rows else None
    if row is None or row.id != request_id or row.name != PERMISSION:
        return None
    return Address(row.name, row.scope, row.scope_id, row.key)


def stored_request(storage: Storage, request_id: object) -> PermissionRequest | None:
    """A request as it is stored, or None."""
    address = stored_address(storage, request_id)
    state = None if address is None else _documents.load(storage, address)
    return None if state is None else request_of(state.value)


def stored_open_requests(storage: Storage) -> list[PermissionRequest]:
    """The open requests by what is stored, oldest first: the calls that wait tell which."""
    found: dict[int, PermissionRequest] = {}
    for id in _awaited(storage):
        request = stored_request(storage, id)
        if request is not None and request.state == "open":
            found[id] = request
    return [found[id] for id in sorted(found)]


def _awaited(storage: Storage) -> Iterator[int]:
    """What is awaited besides tasks and conversations, by anybody."""
    after = 0
    while waits := storage.waits(after=after, limit=_WAITS_PAGE):
        for task, text in waits:
            try:
                yield from _codec.decode_wait(_json.loads_stored(text)).others
            except NotJsonError as error:
                problem = f"what task {task} waits for cannot be read: {error}"
                raise StorageCorruptError(storage.store, problem) from error
        after = waits[-1][0]
