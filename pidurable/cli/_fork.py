"""`pidurable conversation fork`: one commit, and no work of its own.

Held and left, or asked for, as the other writing commands do it: see `_outside`.
"""

from __future__ import annotations

from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._host import Host
from pidurable.cli._options import Options, check_text
from pidurable.cli._outside import change
from pidurable.cli._render import conversation_text
from pidurable.cli._sessions import bring_up_to_date
from pidurable.cli._tasks import check_store
from pidurable.errors import InvalidArgumentError, NotFoundError
from pidurable.harness._client import Client
from pidurable.harness._open import Harness
from pidurable.harness._reader import open_reader

__all__ = ["fork_conversation"]


async def fork_conversation(
    host: Host, options: Options, conversation_id: int, *, at: int | None, key: str | None
) -> int:
    """Fork a conversation and print the new one."""
    if key is not None:
        check_text(key, "--key")
    check_store(options.store)
    await bring_up_to_date(options.store)
    async with open_reader(options.store) as reader:
        await reader.conversation(conversation_id)

    async def own(harness: Harness) -> int:
        return (await harness.conversation(conversation_id).fork(at, key=key)).id

    async def ask(client: Client, command: str) -> int:
        return await client.fork(
            conversation_id, at, fork_key=key, key=command, timeout=options.timeout
        )

    try:
        id = await change(host, options, own=own, ask=ask)
    except InvalidArgumentError as error:
        raise UsageError(f"--{error}") from error
    except NotFoundError as error:
        hint = f"`pidurable conversation log {conversation_id}` shows what is there."
        raise NotFoundError(
            error.kind, error.id, hint, place=f"conversation {conversation_id}"
        ) from error
    async with open_reader(options.store) as reader:
        record = await reader.conversation(id)
    if options.output == "json":
        host.out_json(
            {"conversation": record.id, "parent": record.parent, "entry": record.parent_entry}
        )
    elif options.output == "ids":
        host.out(str(record.id))
    else:
        host.out(conversation_text(record))
    return Exit.DONE
