"""Read, write and edit files and run commands in a working directory.

The tools work in whatever environment the host supplies (`Env`): one local folder by default, a
container if there is one. Path checks are hygiene, not a sandbox: `bash` can do whatever the user
can.
"""

from __future__ import annotations

from pidurable import Extension, SectionInput, section

from ._files import edit as edit, read as read, write as write
from ._shell import bash as bash


def render_cwd(input: SectionInput) -> str:
    """Say where relative paths begin."""
    return f"The working directory is {input.cwd or input.env.root}."


extension = Extension(
    "coding", tools=[read, write, edit, bash], sections=[section("cwd", render_cwd)]
)
