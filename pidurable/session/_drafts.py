"""The end of drafts: objects of a body, which nobody may touch once it has ended.

What is changed in a draft then would be stored nowhere, and what is read from it may never have
been committed. So the draft becomes an instance of a subclass that refuses both. What the body has
taken out of it before, a list say, is plain Python and not known here.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from pidurable.errors import TransactionClosedError

if TYPE_CHECKING:
    from pidurable.session._documents import DocumentDefinition

_ENDED = "__pidurable_ended_draft__"


def end_draft(draft: Any, definition: DocumentDefinition) -> None:
    """Have every later look at an attribute of a draft, and every change, refused.

    A draft whose class takes no subclass is left alone: its commit has succeeded, or failed for
    another reason, and nobody is to be told of this one instead.
    """
    cls = definition.cls
    if _ENDED not in cls.__dict__:
        try:
            ended = _ended_class(cls, f"draft of {definition.name}")
        except Exception:  # what a class does with its subclasses is code of others
            ended = None
        setattr(cls, _ENDED, ended)
    ended = cls.__dict__[_ENDED]
    if ended is not None:
        object.__setattr__(draft, "__class__", ended)


def _ended_class(cls: type, what: str) -> type:
    def look(self: object, name: str) -> Any:
        # Python itself asks for these, also where nobody looks at the draft.
        if name.startswith("__") and name.endswith("__"):
            return object.__getattribute__(self, name)
        raise TransactionClosedError(what)

    def change(self: object, *_: Any) -> None:
        raise TransactionClosedError(what)

    def show(self: object) -> str:
        return f"<{what}, whose commit body has ended>"

    members = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__getattribute__": look,
        "__setattr__": change,
        "__delattr__": change,
        "__repr__": show,
    }
    return types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(members))
