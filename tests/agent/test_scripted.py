"""Scripted models answer by the request alone, are strict, and remember what they were asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from pidurable.agent._models import (
    Deferred,
    Done,
    ModelRequest,
    Models,
    RequestMessage,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStart,
)
from pidurable.agent._script import (
    Cut,
    Expect,
    RequestView,
    ScriptedCall,
    ScriptedError,
    Stall,
    Step,
    When,
)
from pidurable.agent._scripted import ScriptedModel, ScriptedProvider
from pidurable.errors import InvalidArgumentError, MissingExtraError, ModelError, NotFoundError
from pidurable.records._messages import (
    AssistantMessage,
    TextBlock,
    ToolDeclaration,
    ToolResultMessage,
    Usage,
    UserMessage,
)


def user(text: str) -> RequestMessage:
    """A message of a user."""
    return RequestMessage(message=UserMessage(blocks=(TextBlock(text=text),), at_us=0))


def said(message: AssistantMessage, entry: int) -> RequestMessage:
    """An answer, as it stands in a later request."""
    return RequestMessage(message=message, entry=entry)


def result(entry: int, text: str, name: str = "read") -> RequestMessage:
    """The result of the first call of an answer."""
    blocks = (TextBlock(text=text),)
    return RequestMessage(
        message=ToolResultMessage(
            call=(entry, 0), name=name, blocks=blocks, is_error=False, at_us=0
        )
    )


def request(
    *messages: RequestMessage, model: str = "scripted/model", **fields: Any
) -> ModelRequest:
    """A request with these messages."""
    return ModelRequest(model=model, messages=messages, **fields)


async def events_of(models: Models, asked: ModelRequest) -> list[StreamEvent]:
    """All events of a request."""
    async with models.stream(asked) as events:
        return [event async for event in events]


async def seen_before_the_error(models: Models, seen: list[StreamEvent]) -> None:
    """Read a stream that fails, keeping what came before."""
    async with models.stream(request(user("x"))) as events:
        async for event in events:
            seen.append(event)


async def ask(models: Models, *messages: RequestMessage, **fields: Any) -> AssistantMessage:
    """The answer to a request."""
    events = await events_of(models, request(*messages, **fields))
    assert isinstance(events[-1], Done)
    return events[-1].message


CALL = Step(calls=(ScriptedCall(name="read", arguments={"path": "a"}),), text="I look.")


async def test_the_step_is_the_number_of_answers_in_the_request() -> None:
    """The same request gets the same step, however often and in whatever order it is asked."""
    script = ScriptedModel(["one", "two", "three"])
    models = script.models()

    first = await ask(models, user("a"))
    second = await ask(models, user("a"), said(first, 2), user("b"))
    again = await ask(models, user("a"))
    restarted = await ask(
        ScriptedModel(["one", "two", "three"]).models(),
        user("a"),
        said(first, 2),
        user("b"),
        said(second, 4),
        user("c"),
    )

    assert (first.text, second.text, again.text) == ("one", "two", "one")
    assert restarted.text == "three"
    assert len(script.requests) == 3


async def test_the_position_in_a_run_starts_anew_with_every_input() -> None:
    """With position="run" only answers since the last user message count."""
    models = ScriptedModel([CALL, "done"], position="run").models()

    first = await ask(models, user("a"))
    second = await ask(models, user("a"), said(first, 2), result(2, "x"))
    third = await ask(models, user("a"), said(first, 2), result(2, "x"), said(second, 4), user("b"))

    assert (first.stop_reason, second.text, third.stop_reason) == ("tool_use", "done", "tool_use")


async def test_a_step_can_name_its_requests() -> None:
    """Steps with `when` are asked first, by what the request holds; others go by position."""

    def about_cats(view: RequestView) -> bool:
        return "cat" in view.user

    models = ScriptedModel(
        [
            "plain",
            Step(text="dogs", when=When(user="dog", turn=0)),
            Step(text="cats", when=about_cats),
            {"text": "short", "when": "bird"},
        ]
    ).models()

    answers = [(await ask(models, user(text))).text for text in ("dog", "cat", "bird", "fish")]

    assert answers == ["dogs", "cats", "short", "plain"]


async def test_an_answer_is_streamed_in_its_pieces(autojump_clock: Any) -> None:
    """Thinking, text and arguments come in pieces, each after the delay, then the answer."""
    step = Step(
        thinking="hmm",
        text=("ab", "cd"),
        calls=(ScriptedCall(name="read", arguments='{"a":1}'),),
        piece_chars=3,
        delay=2.0,
        usage=Usage(requests=1, input_tokens=5, output_tokens=6),
    )
    started = trio.current_time()

    events = await events_of(ScriptedModel([step]).models(), request(user("x")))

    assert events[:-1] == [
        ThinkingDelta("hmm"),
        TextDelta("ab"),
        TextDelta("cd"),
        ToolCallStart(0, "read"),
        ToolCallDelta(0, '{"a'),
        ToolCallDelta(0, '":1'),
        ToolCallDelta(0, "}"),
    ]
    done = events[-1]
    assert isinstance(done, Done)
    assert done.message.tool_calls[0].arguments == {"a": 1}
    assert done.message.usage.output_tokens == 6
    assert trio.current_time() - started == pytest.approx(16.0)


async def test_a_fault_happens_once_before_the_answer() -> None:
    """A step with an error and an answer fails the first time it is asked, and answers then."""
    step = Step(text="ok", error=ScriptedError(kind="retryable", retry_after=3.0))
    models = ScriptedModel([step]).models()

    with pytest.raises(ModelError) as caught:
        await ask(models, user("x"))
    answer = await ask(models, user("x"))

    assert (caught.value.kind, caught.value.retry_after) == ("retryable", 3.0)
    assert answer.text == "ok"


async def test_a_fault_without_an_answer_happens_always_or_as_often_as_told() -> None:
    """`times` bounds the fault; without it a bare error stays."""
    bare = ScriptedModel([{"error": "auth"}]).models()
    twice = ScriptedModel([{"error": "other", "times": 2, "text": "ok"}]).models()

    for _ in range(4):
        with pytest.raises(ModelError):
            await ask(bare, user("x"))
    for _ in range(2):
        with pytest.raises(ModelError):
            await ask(twice, user("x"))
    assert (await ask(twice, user("x"))).text == "ok"


async def test_tries_are_counted_across_a_restart_with_a_log(tmp_path: Path) -> None:
    """A new process with the same log knows that the step has failed already."""
    log = tmp_path / "log.jsonl"
    step = {"text": "ok", "error": {"detail": "once"}}

    with pytest.raises(ModelError, match="once"):
        await ask(ScriptedModel([step], log=log).models(), user("x"))
    with log.open("a") as file:
        file.write('{"key": "torn')
    answer = await ask(ScriptedModel([step], log=log).models(), user("x"))

    assert answer.text == "ok"


@pytest.mark.refuses
async def test_every_request_is_logged_as_a_line(tmp_path: Path) -> None:
    """The log holds the messages, the step and the tools of each request, also refused ones."""
    log = tmp_path / "log.jsonl"
    script = ScriptedModel(["hi"], log=log)
    read = ToolDeclaration(name="read", description="", schema={"type": "object"})

    await ask(script.models(), user("x"), system="Be brief.", tools=(read,))
    with pytest.raises(ModelError):
        await ask(script.models(), user("\ud800"))

    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert (first["step"], first["system"], first["tools"]) == (0, "Be brief.", ["read"])
    assert first["messages"][0]["blocks"][0]["text"] == "x"
    assert first["messages"][0]["role"] == "UserMessage"
    assert second["tries"] == 0
    assert first["refused"] is None
    assert second["refused"].startswith("refused request: message 0, block 0 is not strict JSON")


@pytest.mark.parametrize("raises", [False, True])
async def test_a_cut_stream_is_retryable_and_answers_the_next_time(raises: bool) -> None:
    """A cut shows its pieces, fails as retryable, and the step answers when asked again."""
    step = Step(text=("a", "b", "c"), cut=Cut(after=2, raises=raises))
    models = ScriptedModel([step]).models()
    seen: list[StreamEvent] = []

    with pytest.raises(ModelError) as caught:
        await seen_before_the_error(models, seen)

    assert seen == [TextDelta("a"), TextDelta("b")]
    assert caught.value.kind == "retryable"
    assert (await ask(models, user("x"))).text == "abc"


@pytest.mark.parametrize(("after", "count"), [(-1, 0), (0, 0), (1, 1)])
async def test_a_stalled_stream_is_silent_until_left(
    after: int, count: int, autojump_clock: Any
) -> None:
    """A stall shows its pieces and then nothing, until the silence limit ends it."""
    models = ScriptedModel([Step(text=("a", "b"), stall=Stall(after=after))]).models()
    seen: list[StreamEvent] = []

    with pytest.raises(ModelError, match="sent nothing for 120 s"):
        await seen_before_the_error(models, seen)

    assert len(seen) == count


async def test_an_unmet_expectation_fails_the_request_and_the_check() -> None:
    """What a step expects and does not see is an error of the request, and is kept."""
    script = ScriptedModel([Step(text="ok", expect=Expect(user="hello", absent="secret"))])

    await ask(script.models(), user("hello you"))
    script.check()
    with pytest.raises(ModelError, match="expected 'hello' in the user's text, saw 'bye'"):
        await ask(script.models(), user("bye"))
    with pytest.raises(ModelError, match="nowhere"):
        await ask(script.models(), user("hello secret"))

    with pytest.raises(AssertionError, match="step 0: expected 'hello'"):
        script.check()


@pytest.mark.parametrize(
    ("expect", "met"),
    [
        (Expect(results=("out",)), True),
        (Expect(results=("out", "more")), False),
        (Expect(results=("other",)), False),
        (Expect(system="brief"), True),
        (Expect(system="long"), False),
        (Expect(tools=("read",)), True),
        (Expect(tools=("write",)), False),
        (Expect(text="I look"), True),
        (Expect(text="nowhere"), False),
    ],
)
def test_expectations_look_at_the_whole_request(expect: Expect, met: bool) -> None:
    """Results, system prompt, tools and any text can be expected."""
    view = RequestView(
        answers=1,
        turn=1,
        user="x",
        results=("the output",),
        system="Be brief.",
        tools=("read",),
        text="x\nI look.\nthe output",
    )

    assert (expect.problem(view) is None) == met


@pytest.mark.refuses
async def test_a_history_that_no_provider_takes_is_refused() -> None:
    """Every request is checked strictly, and the check stays failed."""  # C001
    script = ScriptedModel(["one", CALL])
    call = AssistantMessage(
        blocks=(), status="complete", stop_reason="stop", model="", usage=Usage(), at_us=0
    )

    with pytest.raises(ModelError, match=r"refused request: .* has no content"):
        await ask(script.models(), user("a"), said(call, 2), user("b"))

    with pytest.raises(AssertionError, match="has no content"):
        script.check()


async def test_a_request_beyond_the_window_overflows() -> None:
    """With a context window, long requests overflow, and the model says what it holds."""
    script = ScriptedModel(["ok"], context_window=100)
    models = script.models()

    with pytest.raises(ModelError) as caught:
        await ask(models, user("x" * 1000))

    assert caught.value.kind == "overflow"
    assert models.resolve("scripted/model").context_window == 100
    assert (await ask(models, user("short"))).text == "ok"


async def test_a_script_can_answer_later_and_logs_who_asked(tmp_path: Path) -> None:
    """A deferred step is answered at its last poll, by the handle alone, also from a YAML file."""
    path = tmp_path / "later.yaml"
    log = tmp_path / "log.jsonl"
    steps = (
        "- {text: at last, defer: {polls: 2, seconds: 5, error: other}}\n- {text: b, defer: 3}\n"
    )
    path.write_text(f"log: {log}\nsteps:\n{steps}")
    asked = request(user("a"), model=f"scripted/{path}")
    seen: list[Any] = []

    async def polled(handle: Any) -> StreamEvent:
        # A provider of its own: nothing is remembered from one poll to the next.
        models = Models([ScriptedProvider()])
        async with models.poll(asked, handle) as events:
            (event, *rest) = [event async for event in events]
        seen.append(handle)
        return rest[-1] if rest else event

    models = Models([ScriptedProvider()])
    (first,) = await events_of(models, asked)
    assert isinstance(first, Deferred)
    with pytest.raises(ModelError, match="scripted error"):
        await polled(first.handle)
    path.write_text(path.read_text().replace(", error: other", ""))
    second = await polled(first.handle)
    assert isinstance(second, Deferred)
    last = await polled(second.handle)
    await models.cancel(asked, second.handle)

    assert isinstance(last, Done)
    assert last.message.text == "at last"
    assert (first.poll_seconds, [handle["polls"] for handle in seen]) == (5.0, [2, 1])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [next(k for k in ("poll", "cancel", "key") if k in line) for line in lines] == [
        "key",
        "poll",
        "poll",
        "poll",
        "cancel",
    ]


async def test_a_script_that_has_ended_says_so() -> None:
    """A request without a step is an error that counts; `repeat_last` goes on instead."""
    done = await ask(ScriptedModel(["one"]).models(), user("a"))

    with pytest.raises(ModelError, match=r"has 1 steps, and none is for a request with 1 answers"):
        await ask(ScriptedModel(["one"]).models(), user("a"), said(done, 2), user("b"))
    repeated = ScriptedModel(["one"], repeat_last=True).models()
    assert (await ask(repeated, user("a"), said(done, 2), user("b"))).text == "one"


async def test_arguments_that_are_no_json_stay_text() -> None:
    """A scripted call with cut arguments answers with a str, as a real model's would."""  # C064
    step = Step(calls=(ScriptedCall(name="read", arguments='{"path": "a'),))

    answer = await ask(ScriptedModel([step]).models(), user("x"))

    assert answer.tool_calls[0].arguments == '{"path": "a'


YAML = """
position: run
context_window: 5000
steps:
  - text: [Hel, lo]
    thinking: hm
    calls:
      - {name: read, arguments: {path: a.txt}}
      - {name: write, arguments: '{"cut'}
    usage: {input_tokens: 3, output_tokens: 4}
    expect: please
  - error: {kind: retryable, retry_after: 2}
    text: done
    when: {result: out}
"""


@pytest.mark.refuses
async def test_a_script_is_read_from_yaml_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scripted/<path>.yaml` is served from the file, with every kind of field."""
    (tmp_path / "demo.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    models = Models([ScriptedProvider()])
    messages = (user("please"),)

    first = await ask(models, *messages, model="scripted/demo.yaml")
    first_result = (*messages, said(first, 2), result(2, "the out"))
    with pytest.raises(ModelError) as refused:
        await ask(models, *first_result, model="scripted/demo.yaml")

    assert first.text == "Hello"
    assert [call.arguments for call in first.tool_calls] == [{"path": "a.txt"}, '{"cut']
    assert first.usage.output_tokens == 4
    assert "has no result" in str(refused.value) or "comes before" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- {txet: hi}", r"steps\[0\] has no field 'txet'; did you mean 'text'"),
        ("- {error: {sort: auth}}", r"steps\[0\]\.error has no field 'sort'"),
        ("- {calls: [{name: a, arguments: {day: 2020-01-01}}]}", r"calls\[0\]\.arguments"),
        ("- {delay: -1}", "delay"),
        ("steps: 7", "must be a list"),
        ("7", "must be a mapping"),
        ("- [", "cannot be read"),
    ],
)
def test_a_faulty_script_says_where(tmp_path: Path, text: str, problem: str) -> None:
    """A wrong field, type or value is refused with its place in the file."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)

    with pytest.raises(InvalidArgumentError, match=problem):
        ScriptedModel.load(path)


def test_a_missing_yaml_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the YAML library a script file cannot be read, and the error says what to install."""
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(MissingExtraError, match=r"pidurable\[cli\]"):
        ScriptedModel.load(tmp_path / "any.yaml")


async def test_scripted_models_need_no_catalogue() -> None:
    """A scripted model costs nothing and never has the price list loaded."""
    code = (
        "import sys, trio\n"
        "from pidurable.testing import ScriptedModel\n"
        "models = ScriptedModel(['x']).models()\n"
        "assert models.resolve('scripted/model').cost.__self__.prices is None\n"
        "heavy = {'genai_prices', 'pydantic', 'pydantic_ai', 'yaml', 'openai'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = await trio.run_process([sys.executable, "-c", code], capture_stdout=True)

    assert done.stdout.strip() == b"[]"


async def test_a_faulty_script_is_an_error_of_its_request(tmp_path: Path) -> None:
    """A file that cannot be used fails the request, not the process."""
    path = tmp_path / "bad.yaml"
    path.write_text("- {txet: hi}")

    with pytest.raises(ModelError, match="did you mean 'text'"):
        await ask(Models([ScriptedProvider()]), user("x"), model=f"scripted/{path}")


def test_an_unknown_scripted_model_is_refused_with_the_nearest(tmp_path: Path) -> None:
    """A name that was not given, or a file that is not there, does not exist."""
    models = Models([ScriptedProvider([ScriptedModel(["x"], name="weather")])])

    with pytest.raises(NotFoundError, match="Did you mean the model 'scripted/weather'"):
        models.resolve("scripted/wether")
    with pytest.raises(NotFoundError):
        models.resolve(f"scripted/{tmp_path}/none.yaml")
    assert models.resolve("scripted/weather").id == "weather"
