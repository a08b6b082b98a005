"""Answers to commands from outside that nobody can ask for any more.

An answer stays for at least a week, whatever the age that a collection is given: an outsider may be
stopped for long. Then it goes, and "applied once" holds all the same:

* a key that was drawn for its command says when that was. Before the first such answer goes, what
  waits outside is taken in, however old it is, and the horizon is stored, a moment that only grows:
  from then on no command is taken whose key was drawn before it and that has no answer. It does not
  pass what the holder has in hand, so answers to later keys wait for that. It is just behind the
  newest key that goes, so that a collection under a clock that was years ahead does not refuse all
  that is handed in until then;
* of any other key the row stays, without its answer, so that the key is known for ever, as request
  ids and keys of tasks are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pidurable.records._commands import GONE, HORIZON, drawn_at_us
from pidurable.records._limits import ANSWER_SECONDS_MIN
from pidurable.storage import CommandRow, Op, RecordKind, Storage
from pidurable.tasks._gc_rows import Piece, Write, stored_size
from pidurable.tasks._gc_trees import PAGE


def answers_before_us(now_us: int, before_us: int, in_hand: Iterable[str] = ()) -> int:
    """The moment before which something must have been answered to go.

    Args:
        now_us: The wall clock.
        before_us: The cutoff of the collection.
        in_hand: Keys of commands that were taken and have no answer. The horizon must not pass
            them: whoever takes them again, if their holder dies, could not tell that they were
            never done.
    """
    drawn = [at_us for at_us in map(drawn_at_us, in_hand) if at_us is not None]
    return min([before_us, now_us - int(ANSWER_SECONDS_MIN * 1_000_000), *drawn])


def old_answers(storage: Storage, *, before_us: int) -> Iterator[Piece | None]:
    """Give what goes, a piece for each answer, with the horizon in front of them.

    Args:
        storage: The store.
        before_us: From `answers_before_us`.
    """
    known = storage.command(HORIZON)
    horizon_us = 0 if known is None else known.at_us
    after: tuple[str] | None = None
    while rows := storage.scan(RecordKind.COMMAND, after=after, limit=PAGE):
        after = (rows[-1][0],)
        old = [
            row for row in map(CommandRow._make, rows) if is_old_answer(row, before_us=before_us)
        ]
        newest_us = max((drawn_at_us(row.id) or 0 for row in old), default=0)
        if newest_us >= max(horizon_us, 1):
            horizon_us = newest_us + 1
            mark = CommandRow(HORIZON, "horizon", "", GONE, 0, horizon_us)
            yield Piece([(Op.COMMAND_DELETE, (HORIZON,)), (Op.COMMAND, mark)], "", 0, 0)
        for row in old:
            writes: list[Write] = [(Op.COMMAND_DELETE, (row.id,))]
            if drawn_at_us(row.id) is None:
                writes.append((Op.COMMAND, row._replace(answer=GONE)))
            yield Piece(writes, "answers", 1, stored_size(row.answer))
        yield None


def is_old_answer(row: CommandRow, *, before_us: int) -> bool:
    """Whether an answer goes. One whose key was drawn by a clock that is ahead has to wait."""
    if row.id == HORIZON or row.answer == GONE or row.at_us >= before_us:
        return False
    drawn_us = drawn_at_us(row.id)
    return drawn_us is None or drawn_us < before_us
