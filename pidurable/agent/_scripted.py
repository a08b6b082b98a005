"""The scripted provider: a model for tests, demos and examples that answers from a script.

It is a strict provider: every request is checked as the pickiest one would (`_strict`), so that a
history which no provider takes is found here. It remembers what it was asked, in memory and, where
a path is given, as lines of a file, so that a test can look at it after a kill.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, final

import attrs
import trio

from pidurable.agent._models import (
    Deferred,
    Done,
    ModelInfo,
    ModelRequest,
    Models,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStart,
    parse_arguments,
)
from pidurable.agent._script import (
    Defer,
    Position,
    RequestView,
    Script,
    ScriptedError,
    Step,
    load_script,
    make_step,
    view_request,
)
from pidurable.agent._strict import StrictRequestError, check_request
from pidurable.errors import InvalidArgumentError, ModelError, NotFoundError
from pidurable.records._json import dumps
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    Usage,
)

__all__ = ["ScriptedModel", "ScriptedProvider"]


@final
class ScriptedModel:
    """A model that answers from a script and remembers what it was asked.

    The step that answers depends on the request alone: on the number of complete answers that it
    holds, or on the step's `when`. Nothing has to be reset, and a restarted process goes on where
    the killed one was. How often a faulty step was asked is counted in memory, and in the log file
    where there is one, so that "fails once" holds across a restart too.

    Args:
        steps: Texts, `Step`s, or mappings with their fields.
        name: What stands after the slash in `scripted/<name>`.
        position: Count answers of the whole "conversation", or of the "run" (since the last user
            message: every input starts the script anew).
        repeat_last: Answer with the last step when there are no more, instead of failing.
        context_window: Requests of more tokens (four characters each) overflow; None: never.
        log: A file to append every request to, as JSON lines, flushed; `refused` in a line says
            why the strict checks refused the request, or is null.
    """

    def __init__(
        self,
        steps: Sequence[Step | str | Mapping[str, Any]] = (),
        *,
        name: str = "model",
        position: Position = "conversation",
        repeat_last: bool = False,
        context_window: int | None = None,
        log: str | Path | None = None,
    ) -> None:
        made = tuple(make_step(step, f"steps[{number}]") for number, step in enumerate(steps))
        self._script = Script(
            steps=made,
            position=position,
            repeat_last=repeat_last,
            context_window=context_window,
            log=None if log is None else str(log),
        )
        self.name = name
        self.requests: list[ModelRequest] = []
        """Every request, in order of arrival, also those that were refused."""
        self.failures: list[str] = []
        """What strict checks and expectations found; see `check`."""
        self.polls: list[Any] = []
        """The handles of deferred answers that were asked for, in order."""
        self.cancelled: list[Any] = []
        """The handles of deferred answers that nobody waits for any more."""
        self._tries: dict[str, int] | None = None

    @classmethod
    def load(cls, path: str | Path, *, name: str | None = None) -> ScriptedModel:
        """Read the script from a YAML file."""
        script = load_script(path)
        model = cls(name=name or Path(path).stem)
        model._script = script
        return model

    def models(self, *, catalogue: Mapping[str, ModelInfo] | None = None) -> Models:
        """Return models of which this is the only one, as "scripted/<name>"."""
        provider = ScriptedProvider({self.name: self})
        info = {f"scripted/{self.name}": ModelInfo(context_window=self._script.context_window)}
        return Models([provider], catalogue={**info, **(catalogue or {})})

    def check(self) -> None:
        """Raise AssertionError if a request was not what a strict provider or the script expected.

        A failed expectation is also an error of its request, but a run may have survived it.
        """
        if self.failures:
            raise AssertionError("; ".join(self.failures))

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        """Answer a request with the step that it is due."""
        self.requests.append(request)
        view = view_request(request)
        refused = _refusal(request)
        number, tries = self._count(request, view, refused)
        step = self._step(view, number, refused)
        faulty = step.is_fault(tries)
        if faulty and step.error is not None:
            raise _model_error(step.error)
        if faulty and step.stall is not None and step.stall.after < 0:
            await trio.sleep_forever()
        if step.defer is not None and not faulty:
            yield _deferred(step.defer, number, step.defer.polls)
            return
        async with aclosing(_play(step, request, view, faulty)) as events:
            yield events

    @asynccontextmanager
    async def poll(
        self, request: ModelRequest, handle: Any
    ) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        """Answer a request that was deferred. The handle says which step, and how often yet."""
        self.polls.append(handle)
        self._log({"poll": handle})
        step = self._script.steps[handle["step"]]
        assert step.defer is not None
        if step.defer.error is not None and self.polls.count(handle) == 1:
            raise _model_error(step.defer.error)
        if handle["polls"] > 1:
            yield _deferred(step.defer, handle["step"], handle["polls"] - 1)
            return
        async with aclosing(_play(step, request, view_request(request), faulty=False)) as events:
            yield events

    async def cancel(self, request: ModelRequest, handle: Any) -> None:
        """Remember that nobody waits any more."""
        self.cancelled.append(handle)
        self._log({"cancel": handle})
        await trio.lowlevel.checkpoint()

    def _step(
        self, view: RequestView, number: int | None, refused: StrictRequestError | None
    ) -> Step:
        if refused is not None:
            self.failures.append(str(refused))
            raise refused
        window = self._script.context_window
        if window is not None and view.input_tokens > window:
            detail = f"{view.input_tokens} tokens do not fit the context window of {window}"
            raise ModelError("overflow", detail)
        if number is None:
            detail = (
                f"the script of {self.name!r} has {len(self._script.steps)} steps, and none is for "
                f"a request with {view.answers} answers ({view.turn} since the last user message)"
            )
            raise ModelError("other", detail)
        step = self._script.steps[number]
        problem = None if step.expect is None else step.expect.problem(view)
        if problem is not None:
            self.failures.append(f"step {number}: {problem}")
            raise ModelError("other", f"step {number} of the script {self.name!r}: {problem}")
        return step

    def _count(
        self, request: ModelRequest, view: RequestView, refused: StrictRequestError | None
    ) -> tuple[int | None, int]:
        """Choose a step, and count how often it was asked for the same request before."""
        number = self._script.choose(view)
        if self._tries is None:
            self._tries = dict[str, int]()
            for line in self._logged():
                key = str(line["key"])
                self._tries[key] = self._tries.get(key, 0) + 1
        asked = f"{self.name}\n{number}\n{view.answers}\n{view.turn}\n{view.user}"
        key = hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        tries = self._tries.get(key, 0)
        self._tries[key] = tries + 1
        if self._script.log is not None:
            self._append(key, number, tries, request, refused)
        return number, tries

    def _logged(self) -> Iterator[dict[str, Any]]:
        if self._script.log is None or not Path(self._script.log).exists():
            return
        for line in Path(self._script.log).read_text(encoding="utf-8").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote its last line
            if isinstance(value, dict) and "key" in value:
                yield value

    def _append(
        self,
        key: str,
        number: int | None,
        tries: int,
        request: ModelRequest,
        refused: StrictRequestError | None,
    ) -> None:
        line = {
            "key": key,
            "model": request.model,
            "step": number,
            "tries": tries,
            "refused": None if refused is None else str(refused),
            "system": request.system,
            "tools": [tool.name for tool in request.tools],
            "messages": [
                {
                    "role": type(item.message).__name__,
                    "entry": item.entry,
                    **attrs.asdict(item.message),
                }
                for item in request.messages
            ],
        }
        self._log(line)

    def _log(self, line: Mapping[str, Any]) -> None:
        if self._script.log is None:
            return
        # Plain `json`: a request that is not strict JSON is logged too, and refused after that.
        path = Path(self._script.log)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


@final
class ScriptedProvider:
    """Serves scripted models by name, and any YAML file by its path: `scripted/demo/a.yaml`."""

    def __init__(
        self,
        models: Mapping[str, ScriptedModel] | Sequence[ScriptedModel] = (),
        *,
        name: str = "scripted",
    ) -> None:
        named = models if isinstance(models, Mapping) else {model.name: model for model in models}
        self._models = dict(named)
        self._files: dict[str, ScriptedModel] = {}
        self._name = name

    @property
    def name(self) -> str:
        """What stands before the slash of a model's name."""
        return self._name

    def known_models(self) -> list[str]:
        """Return the names of the models that were given; files are not listed."""
        return list(self._models)

    def has_model(self, model_id: str) -> bool:
        """Tell whether a model was given by this name, or is a YAML file that exists."""
        return model_id in self._models or (_is_script(model_id) and Path(model_id).is_file())

    def stream(
        self, request: ModelRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Answer a request from the script of its model."""
        model_id = request.model.partition("/")[2]
        return self._get(model_id).stream(request)

    def poll(
        self, request: ModelRequest, handle: Any
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Answer a request that the script of its model had deferred."""
        return self._get(request.model.partition("/")[2]).poll(request, handle)

    async def cancel(self, request: ModelRequest, handle: Any) -> None:
        """Tell the model that nobody waits for a deferred answer any more."""
        await self._get(request.model.partition("/")[2]).cancel(request, handle)

    def _get(self, model_id: str) -> ScriptedModel:
        model = self._models.get(model_id) or self._files.get(model_id)
        if model is None:
            if not _is_script(model_id):
                raise NotFoundError("model", f"{self._name}/{model_id}")
            try:
                model = ScriptedModel.load(model_id, name=model_id)
            except InvalidArgumentError as error:
                raise ModelError("other", str(error)) from error
            self._files[model_id] = model
        return model


async def _deferred(
    defer: Defer, number: int | None, polls: int
) -> AsyncGenerator[StreamEvent, None]:
    yield Deferred({"step": number, "polls": polls}, defer.seconds)


def _refusal(request: ModelRequest) -> StrictRequestError | None:
    """Why a strict provider would refuse the request, or None."""
    try:
        check_request(request)
    except StrictRequestError as error:
        return error
    return None


def _is_script(model_id: str) -> bool:
    return model_id.endswith((".yaml", ".yml"))


def _model_error(error: ScriptedError) -> ModelError:
    # A str is a header of the HTTP server; only a number means something here.
    after = error.retry_after if isinstance(error.retry_after, int | float) else None
    return ModelError(error.kind, error.detail, after)


def call_arguments_text(arguments: Any) -> str:
    """Return what a model would have written as arguments."""
    return arguments if isinstance(arguments, str) else dumps(arguments)


def _pieces(step: Step) -> Iterator[StreamEvent]:
    for piece in step.split(step.thinking):
        yield ThinkingDelta(piece)
    for piece in step.text_pieces:
        yield TextDelta(piece)
    for index, call in enumerate(step.calls):
        yield ToolCallStart(index, call.name)
        for piece in step.split(call_arguments_text(call.arguments)):
            yield ToolCallDelta(index, piece)


async def _play(
    step: Step, request: ModelRequest, view: RequestView, faulty: bool
) -> AsyncGenerator[StreamEvent, None]:
    cut = step.cut if faulty else None
    stall = step.stall if faulty else None
    for sent, event in enumerate((*_pieces(step), None)):
        if stall is not None and sent >= stall.after:
            await trio.sleep_forever()
        if cut is not None and sent >= cut.after:
            if cut.raises:
                raise trio.BrokenResourceError("the scripted connection broke")
            return
        await trio.sleep(step.delay)
        if event is not None:
            yield event
    yield Done(_answer(step, request, view))


def _answer(step: Step, request: ModelRequest, view: RequestView) -> AssistantMessage:
    blocks: list[Block] = []
    if step.thinking:
        blocks.append(ThinkingBlock(text=step.thinking))
    text = "".join(step.text_pieces)
    if text:
        blocks.append(TextBlock(text=text))
    written = 0
    for call in step.calls:
        arguments_text = call_arguments_text(call.arguments)
        written += len(call.name) + len(arguments_text)
        blocks.append(ToolCallBlock(name=call.name, arguments=parse_arguments(arguments_text)))
    usage = step.usage or Usage(
        requests=1,
        input_tokens=view.input_tokens,
        output_tokens=(len(step.thinking) + len(text) + written) // 4 + 1,
    )
    stop: StopReason = step.stop or ("tool_use" if step.calls else "stop")
    return AssistantMessage(
        blocks=tuple(blocks),
        status="complete",
        stop_reason=stop,
        model=request.model,
        usage=usage,
        at_us=0,
    )
