"""Models: whatever a provider does, what comes out is safe to act upon."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, strategies as st

from pidurable.agent._default_models import default_models
from pidurable.agent._models import (
    Done,
    ModelInfo,
    ModelRequest,
    Models,
    Prices,
    RequestMessage,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStart,
    call_id,
    clean_text,
    parse_arguments,
    render_system_message,
    sendable_arguments,
)
from pidurable.agent._silence import silences
from pidurable.errors import InvalidArgumentError, ModelError, NotFoundError
from pidurable.records._json import dumps
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    ImageBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    Usage,
    UserMessage,
)

HELLO = UserMessage(blocks=(TextBlock(text="hello"),), at_us=1)
REQUEST = ModelRequest(model="fake/m", messages=(RequestMessage(message=HELLO),))

Action = StreamEvent | BaseException | Callable[[], Awaitable[object]]


def answer(*blocks: Block, usage: Usage | None = None, **fields: Any) -> Done:
    """The last event of a stream whose answer has these blocks."""
    values: dict[str, Any] = {"status": "complete", "stop_reason": "stop", **fields}
    return Done(
        AssistantMessage(
            blocks=blocks, model="whatever", usage=usage or Usage(requests=1), at_us=0, **values
        )
    )


SAID = answer(TextBlock(text="hi"))


class Fake:
    """A provider that plays events, waits, and raises, in the order given."""

    name = "fake"

    def __init__(
        self,
        *actions: Action,
        opening: Action | None = None,
        closing: BaseException | None = None,
        nursery: bool = False,
    ) -> None:
        self.actions = actions
        self.opening = opening
        self.closing = closing
        self.nursery = nursery
        self.closed_with: list[str] = []

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        if self.opening is not None:
            await self.act(self.opening)
        if self.nursery:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                yield self.play()
                nursery.cancel_scope.cancel()
            return
        try:
            yield self.play()
        except BaseException as error:
            self.closed_with.append(type(error).__name__)
            raise
        else:
            self.closed_with.append("end")
        finally:
            if self.closing is not None:
                raise self.closing

    async def play(self) -> AsyncIterator[StreamEvent]:
        for action in self.actions:
            event = await self.act(action)
            if event is not None:
                yield event

    async def act(self, action: Action) -> StreamEvent | None:
        await trio.lowlevel.checkpoint()
        if isinstance(action, BaseException):
            raise action
        if callable(action):
            await action()
            return None
        return action


async def collect(provider: Fake, **options: Any) -> list[StreamEvent]:
    """All events of one request."""
    models = Models([provider], now_us=lambda: 77, **options)
    async with models.stream(REQUEST) as events:
        return [event async for event in events]


async def refused(provider: Fake, **options: Any) -> ModelError:
    """The error of one request."""
    with pytest.raises(ModelError) as caught:
        await collect(provider, **options)
    return caught.value


def last(events: Sequence[StreamEvent]) -> AssistantMessage:
    """The message of the last event."""
    assert isinstance(events[-1], Done)
    return events[-1].message


# --- events -----------------------------------------------------------------------------------


async def test_events_pass_in_order_and_end_with_the_answer() -> None:
    """Deltas come as the provider sent them; the answer carries our model name and moment."""
    provider = Fake(
        ThinkingDelta("hm"),
        TextDelta("h"),
        TextDelta("i"),
        ToolCallStart(0, "read"),
        ToolCallDelta(0, "{}"),
        answer(TextBlock(text="hi"), ToolCallBlock(name="read", arguments={})),
    )

    events = await collect(provider)

    assert events[:-1] == list(provider.actions[:-1])
    message = last(events)
    assert (message.model, message.at_us, message.stop_reason) == ("fake/m", 77, "tool_use")
    assert provider.closed_with == ["end"]


async def test_nothing_is_read_after_the_answer() -> None:
    """What a provider sends after its last event is neither shown nor waited for."""
    events = await collect(Fake(SAID, TextDelta("late"), trio.sleep_forever))

    assert [type(event) for event in events] == [Done]


async def test_a_tool_use_without_a_call_is_an_answer() -> None:
    """A stop reason that promises calls which are not there is corrected."""  # C066
    events = await collect(Fake(answer(TextBlock(text="hi"), stop_reason="tool_use")))

    assert last(events).stop_reason == "stop"


@pytest.mark.parametrize("pieces", [(), (TextDelta("half an"),)])
async def test_a_stream_that_just_ends_is_retryable(pieces: tuple[StreamEvent, ...]) -> None:
    """A stream without its last event was cut, with or without content."""  # C068
    error = await refused(Fake(*pieces))

    assert error.kind == "retryable"
    assert "fake/m was cut" in str(error)


@pytest.mark.parametrize(
    ("done", "what"),
    [
        (answer(), "nothing"),
        (answer(TextBlock(text="")), "nothing"),
        (answer(TextBlock(text=" \r\n")), "nothing"),
        (answer(ThinkingBlock(text="hm")), "only thinking"),
        (answer(stop_reason="tool_use"), "nothing"),
    ],
)
async def test_an_answer_with_nothing_in_it_is_retryable(done: Done, what: str) -> None:
    """No text and no call is no answer, whatever the stop reason says."""  # C066
    error = await refused(Fake(done))

    assert error.kind == "retryable"
    assert str(error) == f"empty answer: fake/m returned {what}"


async def test_a_withheld_answer_is_not_retried() -> None:
    """An empty answer of a content filter would be withheld again."""
    error = await refused(Fake(answer(stop_reason="refusal")))

    assert error.kind == "other"


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ModelError("overflow", "too long"), "overflow"),
        (ModelError("retryable", "busy", 3.5), "retryable"),
        (ConnectionResetError("gone"), "retryable"),
        (trio.BrokenResourceError("gone"), "retryable"),
        (EOFError(), "retryable"),
        (KeyError("choices"), "other"),
        (ExceptionGroup("two", [ExceptionGroup("in", [ModelError("auth", "no")])]), "auth"),
    ],
)
@pytest.mark.parametrize("where", ["opening", "reading"])
async def test_every_error_of_a_provider_is_a_model_error(
    raised: Exception, kind: str, where: str
) -> None:
    """Whatever a provider raises, at the start or in mid-stream, has a kind."""
    provider = Fake(opening=raised) if where == "opening" else Fake(TextDelta("x"), raised)

    error = await refused(provider)

    assert error.kind == kind
    assert error.retry_after == (3.5 if kind == "retryable" and "busy" in str(error) else None)


@pytest.mark.parametrize(
    "event",
    [
        Done(None),  # type: ignore[arg-type]
        Done(attrs.evolve(SAID.message, usage=None)),  # type: ignore[arg-type]
        answer("hi"),  # type: ignore[arg-type]
        answer(TextBlock(text=None)),  # type: ignore[arg-type]
        TextDelta(b"hi"),  # type: ignore[arg-type]
        ThinkingDelta(None),  # type: ignore[arg-type]
        ToolCallStart(0, None),  # type: ignore[arg-type]
        ToolCallDelta(0, {}),  # type: ignore[arg-type]
    ],
)
async def test_an_event_of_wrong_types_is_a_model_error(event: StreamEvent) -> None:
    """What the types do not allow is the provider's fault, named, and ends in no bare exception."""
    provider = Fake(event, SAID)

    error = await refused(provider)

    assert error.kind == "other"
    assert f"sent a {type(event).__name__} that is none" in error.detail
    assert provider.closed_with


async def test_an_error_after_the_answer_changes_nothing() -> None:
    """A connection that fails while it is closed does not take the answer back."""
    events = await collect(Fake(SAID, closing=ConnectionResetError("gone")))

    assert last(events).text == "hi"


async def test_an_error_of_the_caller_stays_its_own() -> None:
    """What the body raises leaves bare, also when closing the stream fails then."""
    models = Models([Fake(TextDelta("x"), closing=ConnectionResetError("gone"))])

    with pytest.raises(ZeroDivisionError):
        async with models.stream(REQUEST):
            raise ZeroDivisionError


async def test_leaving_early_closes_the_stream() -> None:
    """A caller that breaks off leaves the provider's block."""
    provider = Fake(TextDelta("x"), trio.sleep_forever)

    async with Models([provider]).stream(REQUEST) as events:
        async for _ in events:
            break

    assert provider.closed_with == ["end"]


async def test_cancelling_closes_the_stream_and_is_not_lost(autojump_clock: Any) -> None:
    """A cancelled caller leaves the provider's block with its cancellation."""  # C051
    provider = Fake(TextDelta("x"), trio.sleep_forever, closing=ConnectionResetError("gone"))

    with trio.move_on_after(1) as scope:
        async with Models([provider]).stream(REQUEST) as events:
            async for _ in events:
                pass

    assert scope.cancelled_caught
    assert provider.closed_with == ["Cancelled"]


# --- silence ----------------------------------------------------------------------------------

MANY = (TextDelta("x"),) * 20


@pytest.mark.parametrize(
    "provider",
    [
        lambda: Fake(opening=trio.sleep_forever),
        lambda: Fake(trio.sleep_forever),
        lambda: Fake(TextDelta("x"), trio.sleep_forever),
        lambda: Fake(ToolCallStart(0, "a"), ToolCallDelta(0, '{"'), trio.sleep_forever),
        lambda: Fake(TextDelta("x"), trio.sleep_forever, nursery=True),
        lambda: Fake(TextDelta("x"), trio.sleep_forever, closing=ConnectionResetError("gone")),
        lambda: Fake(*MANY, trio.sleep_forever),
        lambda: Fake(*MANY, trio.sleep_forever, nursery=True),
    ],
    ids=[
        "before headers",
        "after headers",
        "in text",
        "in arguments",
        "with a nursery",
        "and cannot be closed",
        "in a long text",
        "in a long text, with a nursery",
    ],
)
async def test_a_silent_stream_is_given_up(
    provider: Callable[[], Fake], autojump_clock: Any
) -> None:
    """Silence longer than the setting is a retryable error, wherever it begins."""  # C067
    started = trio.current_time()

    error = await refused(provider(), stream_silence_seconds=120)

    assert error.kind == "retryable"
    assert "fake/m sent nothing for 120 s" in str(error)
    assert trio.current_time() - started == pytest.approx(120)


async def test_a_slow_stream_and_a_slow_caller_are_not_silent(autojump_clock: Any) -> None:
    """The limit counts from event to event, and not while the caller is at work."""

    async def pause() -> None:
        await trio.sleep(100)

    talk = (pause, TextDelta("x")) * 20
    provider = Fake(*talk, pause, SAID, opening=pause)

    async with Models([provider], stream_silence_seconds=120).stream(REQUEST) as events:
        seen = []
        async for event in events:
            seen.append(type(event))
            await trio.sleep(1000)

    assert seen == [*[TextDelta] * 20, Done]


@pytest.mark.parametrize("before", [(), MANY], ids=["short", "long"])
async def test_each_of_many_streams_has_its_own_silence(
    before: tuple[Action, ...], autojump_clock: Any
) -> None:
    """A stream that may be silent for less is given up in its own time, also if it came later."""
    ended: dict[str, float] = {}

    async def read(name: str, begin: float, silence: float, *actions: Action) -> None:
        await trio.sleep(begin)
        await refused(Fake(*before, *actions), stream_silence_seconds=silence)
        ended[name] = trio.current_time()

    async def pause() -> None:
        await trio.sleep(40)

    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, "long", 0, 120, trio.sleep_forever)
        nursery.start_soon(read, "talks", 0, 50, pause, TextDelta("x"), trio.sleep_forever)
        nursery.start_soon(read, "late", 7, 5, trio.sleep_forever)

    assert {name: at - started for name, at in ended.items()} == pytest.approx(
        {"long": 120, "talks": 90, "late": 12}
    )


def watchers() -> tuple[int, float]:
    """How many tasks there are, and the seconds until the next of them has a time to wake at."""
    statistics = trio.lowlevel.current_statistics()
    return statistics.tasks_living, round(statistics.seconds_to_next_deadline, 6)


async def test_nothing_looks_after_streams_when_there_are_none(autojump_clock: Any) -> None:
    """One task looks for silence in all streams; it ends with the last, and begins again."""
    models = Models([Fake(*MANY, SAID)], stream_silence_seconds=120)
    before, _ = watchers()

    for _ in range(2):
        async with models.stream(REQUEST) as events, models.stream(REQUEST):
            await trio.testing.wait_all_tasks_blocked()
            assert watchers() == (before + 1, 120)
            async for _ in events:
                pass
        await trio.testing.wait_all_tasks_blocked()
        assert watchers() == (before, math.inf)


async def test_the_task_that_looks_for_silence_stays_while_there_will_be_streams(
    autojump_clock: Any,
) -> None:
    """Between two streams it wakes at most once, under a virtual clock never; then it ends."""
    models = Models([Fake(SAID)], stream_silence_seconds=120)
    before, _ = watchers()

    with silences().kept(virtual=False):
        async with models.stream(REQUEST):
            await trio.testing.wait_all_tasks_blocked()
        assert watchers() == (before + 1, 120)
        await trio.sleep(121)
        assert watchers() == (before + 1, math.inf)
    await trio.testing.wait_all_tasks_blocked()
    assert watchers() == (before, math.inf)

    with silences().kept(virtual=True), silences().kept(virtual=False):
        for _ in range(2):
            async with models.stream(REQUEST):
                await trio.testing.wait_all_tasks_blocked()
                assert watchers() == (before + 1, 120)
            await trio.testing.wait_all_tasks_blocked()
            assert watchers() == (before + 1, math.inf)
        error = await refused(Fake(trio.sleep_forever), stream_silence_seconds=120)
        assert "sent nothing for 120 s" in str(error)
        async with models.stream(REQUEST):
            pass
    await trio.testing.wait_all_tasks_blocked()
    assert watchers() == (before, math.inf)


async def test_a_task_that_was_told_to_end_before_it_began_leaves_the_next_one_alone(
    autojump_clock: Any,
) -> None:
    """Whichever of the two trio runs first, a silence is noticed in its time."""
    patient = Models([Fake()], stream_silence_seconds=120)
    for _ in range(8):
        async with patient.stream(REQUEST):
            pass
        async with patient.stream(REQUEST):
            await trio.testing.wait_all_tasks_blocked()
            started = trio.current_time()
            await refused(Fake(trio.sleep_forever), stream_silence_seconds=5)
            assert trio.current_time() - started == pytest.approx(5)


# --- texts, arguments, numbers ----------------------------------------------------------------


async def test_a_character_split_over_two_deltas_is_joined() -> None:
    """Half a surrogate pair waits for its other half; a lone one is marked."""  # C082
    provider = Fake(
        TextDelta("a\ud83d"),
        TextDelta("\ude00b\ud800"),
        TextDelta("c"),
        answer(TextBlock(text="a\ud83d\ude00b\ud800c")),
    )

    events = await collect(provider)

    shown = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert shown == last(events).text == "a\U0001f600b\ufffdc"


async def test_nul_is_marked_in_every_place() -> None:
    """NUL, which no store takes, becomes its picture in text, names, thinking and arguments."""
    # C081
    provider = Fake(
        answer(
            ThinkingBlock(text="\0"),
            TextBlock(text="a\0b", opaque={"odd": "\0"}),
            ToolCallBlock(name="x\0", arguments={"path": "\0"}),
        )
    )

    message = last(await collect(provider))

    assert message.text == "a\u2400b"
    assert message.tool_calls[0].name == "x\u2400"
    assert isinstance(message.tool_calls[0].arguments, str)
    for block in message.blocks:
        assert block.opaque is None


async def test_an_answer_is_complete_and_holds_no_image() -> None:
    """What a provider sends last is an answer, whatever it says, and an image in it is a note."""
    image = ImageBlock(blob="none", media_type="image/png\0")
    provider = Fake(answer(image, status="failed", error="odd"))

    message = last(await collect(provider))

    assert (message.status, message.error) == ("complete", None)
    assert message.text == "(an image, image/png\u2400, that is not kept)"


@given(st.text(st.characters()), st.lists(st.integers(0, 60)))
def test_clean_text_gives_storable_text_and_keeps_good_text(text: str, cuts: list[int]) -> None:
    """Any str becomes one that the store takes; one without NUL and surrogates is unchanged."""
    cleaned = clean_text(text)

    assert dumps(cleaned)
    if "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text):
        assert cleaned == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ("[1]", "[1]"),
        ("null", "null"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": 1}}', '{"a": 1}}'),
        ("\ud800", "\ufffd"),
    ],
)
def test_arguments_are_an_object_or_stay_text(text: str, expected: object) -> None:
    """Only an object of strict JSON is one; everything else stays what the model wrote."""
    assert parse_arguments(text) == expected


def test_arguments_cut_anywhere_are_never_an_object() -> None:
    """Arguments that were cut at any byte stay text, and nothing is repaired."""  # C064
    whole = '{"path": "a.txt", "lines": [1, 2]}'

    for end in range(1, len(whole)):
        assert parse_arguments(whole[:end]) == whole[:end]
    assert parse_arguments(whole) == {"path": "a.txt", "lines": [1, 2]}


def test_arguments_nested_too_deeply_stay_text() -> None:
    """Depth beyond the limit of values is no object, and no crash."""
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000

    assert isinstance(parse_arguments(deep), str)
    assert sendable_arguments("x") == {"invalid_arguments": "x"}


async def test_odd_usage_counts_as_nothing_and_costs_are_finite() -> None:
    """NaN, negative, infinite and absurd numbers become 0 and never reach a budget."""  # C084
    usage = Usage(
        input_tokens=math.nan,  # type: ignore[arg-type]
        output_tokens=-5,
        cache_read_tokens=math.inf,  # type: ignore[arg-type]
        cache_write_tokens=10**30,
        cost=math.nan,
    )
    info = {"fake/m": ModelInfo(prices=Prices(input=1.0, output=2.0))}

    events = await collect(Fake(answer(TextBlock(text="x"), usage=usage)), catalogue=info)

    assert last(events).usage == Usage(requests=1)


async def test_costs_come_from_the_hosts_prices_first() -> None:
    """Cached input is charged at its own price, the rest at the plain one."""
    prices = Prices(input=2.0, output=10.0, cache_read=0.5, cache_write=3.0)
    usage = Usage(
        input_tokens=1_000_000,
        output_tokens=100_000,
        cache_read_tokens=400_000,
        cache_write_tokens=100_000,
    )

    events = await collect(
        Fake(answer(TextBlock(text="x"), usage=usage)),
        catalogue={"fake/m": ModelInfo(prices=prices)},
    )

    assert last(events).usage.cost == pytest.approx(0.5 * 2 + 0.4 * 0.5 + 0.1 * 3 + 0.1 * 10)


# --- names ------------------------------------------------------------------------------------


def test_unknown_names_are_refused_with_the_nearest() -> None:
    """A wrong provider or a name without a slash is refused before anything is sent."""
    models = Models([Fake()])

    with pytest.raises(NotFoundError, match=r"no model fakes/m\. Did you mean the provider 'fake'"):
        models.resolve("fakes/m")
    with pytest.raises(NotFoundError, match='named "provider/model"'):
        models.resolve("fake")
    with pytest.raises(NotFoundError, match="Known providers: none"):
        Models().resolve("fake/m")


def test_names_of_providers_are_checked() -> None:
    """Two providers of one name, or a slash in a name, are a mistake of the host."""
    with pytest.raises(InvalidArgumentError, match="unique"):
        Models([Fake(), Fake()])
    with pytest.raises(InvalidArgumentError, match="without a slash"):
        Models({"a/b": Fake()})


def test_the_hosts_facts_come_before_the_catalogue() -> None:
    """A window that the host gives replaces the bundled one; unknown facts are None."""
    pytest.importorskip("genai_prices")
    models = default_models({}, catalogue={"openai/gpt-5": ModelInfo(context_window=9)})

    assert models.resolve("openai/gpt-5").context_window == 9
    assert default_models({}).resolve("openai/gpt-5").context_window == 400_000
    assert default_models({}).resolve("openai/never-heard-of").context_window is None


def test_the_catalogue_prices_known_models_and_no_others() -> None:
    """A known model has a cost by the bundled prices, an unknown one costs 0.0."""
    pytest.importorskip("genai_prices")
    models = default_models({})
    usage = Usage(requests=1, input_tokens=1_000_000)

    assert models.resolve("openai/gpt-5").cost(usage) > 0
    assert models.resolve("openai/never-heard-of").cost(usage) == 0.0
    assert models.resolve("openai/gpt-5").cost(Usage(cache_read_tokens=5)) >= 0.0


def test_call_ids_are_unique_and_fit_every_provider() -> None:
    """Different calls have different ids, of at most 40 harmless characters."""  # C065
    ids = {call_id(entry, index) for entry in (1, 12, 2**53) for index in (0, 1, 20)}

    assert len(ids) == 9
    assert all(len(identity) <= 40 and identity.isascii() for identity in ids)


def test_a_change_of_the_system_prompt_reads_as_text() -> None:
    """Sections are given as they are, removed ones are named, tools are left out."""
    message = SystemMessage(sections={"a": "Be brief.", "b": None, "c": " "}, at_us=0)

    text = render_system_message(message)

    assert text == "Be brief.\n\nThe section 'b' of your instructions no longer applies."
