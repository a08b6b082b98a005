"""Tools, extensions, the registry that holds them, and the environment that tools work in."""

from __future__ import annotations

from pidurable.registry._call import (
    CallResult as CallResult,
    ToolCall as ToolCall,
    ToolResult as ToolResult,
)
from pidurable.registry._env import (
    Env as Env,
    ExitStatus as ExitStatus,
    FileInfo as FileInfo,
    LocalEnv as LocalEnv,
    display_path as display_path,
    nearest_name as nearest_name,
)
from pidurable.registry._extension import Extension as Extension
from pidurable.registry._hooks import (
    Hook as Hook,
    InstalledHook as InstalledHook,
    Section as Section,
    SectionInput as SectionInput,
    SectionWrap as SectionWrap,
    ToolWrap as ToolWrap,
    hook as hook,
    section as section,
    wrap_section as wrap_section,
    wrap_tool as wrap_tool,
)
from pidurable.registry._loader import ExtensionLoader as ExtensionLoader
from pidurable.registry._registry import Registry as Registry
from pidurable.registry._snapshot import RegistrySnapshot as RegistrySnapshot
from pidurable.registry._tool import (
    Tool as Tool,
    ToolArgumentsError as ToolArgumentsError,
    schema_tool as schema_tool,
    tool as tool,
)
