"""Large trees put straight into a store, as an earlier process would have left them."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from worlds import ROOT, Actor, Watcher, World

from pidurable.records import _codec, _json
from pidurable.records._tasks import OutcomeRecord, Status
from pidurable.storage import Batch, ConversationRow, HolderClaim, Op, TaskRow


@attrs.frozen(kw_only=True)
class Seed:
    """One task of the tree: pending at its first phase, holding its outcome, or ended with it."""

    id: int
    name: str
    owner: int | None = None
    held: str | None = None
    """The outcome that it holds; None for a task that is ready to run."""
    ended: bool = False
    """It has ended with that outcome."""


def plant(
    world: World,
    seeds: Iterable[Seed],
    *,
    created_us: int = 1,
    owned: Iterable[tuple[int, int]] = (),
) -> None:
    """Write tasks into the (closed) store of a world, in one batch.

    Args:
        world: Its store has to be new.
        seeds: The tasks, owners first.
        created_us: When everything was created.
        owned: Conversations, as (id, the task that owns it).
    """
    writes: list[tuple[Op, tuple[object, ...]]] = [
        (Op.CONVERSATION, ConversationRow(ROOT, "root", None, None, None, None, "", created_us))
    ]
    last = ROOT
    for seed in seeds:
        status = Status.PENDING if seed.held is None else Status.COMPLETING
        if seed.ended:
            status = Status.TERMINAL
        row = TaskRow(
            id=seed.id,
            conversation=ROOT,
            kind=Actor.name,
            version=1,
            owner=seed.owner,
            key=None,
            background=0,
            on_restart=None,
            deadline_us=None,
            created_us=created_us,
            status=int(status),
            started_us=None if seed.held is None else created_us,
            ended_us=created_us if seed.ended else None,
            abort_us=None,
            abort_reason=None,
            invocations=0 if seed.held is None else 1,
            recoveries=0,
            tries=0,
            ready_us=created_us,
            woken_by=None,
            blocked=None,
            outcome_status=seed.held,
        )
        writes += ((Op.TASK, row), (Op.TASK_INPUT, (seed.id, f'"{seed.name}"')))
        if not seed.ended:
            writes.append((Op.CHECKPOINT, (seed.id, "start", "{}", created_us)))
        if seed.held is not None:
            outcome = OutcomeRecord(status="completed", result=seed.name, has_result=True)
            text = _json.dumps(_codec.encode_outcome(outcome), path="$<outcome>")
            writes.append((Op.OUTCOME, (seed.id, text)))
        last = max(last, seed.id)
    for id, owner in owned:
        row_of = ConversationRow(id, f"owned {id}", None, None, owner, None, "", created_us)
        writes.append((Op.CONVERSATION, row_of))
        last = max(last, id)
    storage = world.base.reopen()
    claim = HolderClaim(holder_id="seed", host="", pid=1, at_us=created_us, lease_seconds=1.0)
    head = storage.acquire(claim, takeover=False)
    storage.apply(
        Batch(
            epoch=head.epoch,
            seq=head.seq + 1,
            next_id=last + 1,
            flush=True,
            writes=writes,
            clean=True,
        )
    )
    storage.release(head.epoch)
    storage.close()


def unwatched(world: World) -> None:
    """Leave out the recount of the whole tree after every batch; it is quadratic in the size."""
    participants = world.rt.session.participants
    for watcher in [each for each in participants if isinstance(each, Watcher)]:
        participants.remove(watcher)
