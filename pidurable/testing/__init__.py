"""For tests of programs that use pidurable, and of storage backends for it."""

from pidurable.agent._script import (
    Cut as Cut,
    Defer as Defer,
    Expect as Expect,
    ScriptedCall as ScriptedCall,
    ScriptedError as ScriptedError,
    Stall as Stall,
    Step as Step,
    When as When,
)
from pidurable.agent._scripted import (
    ScriptedModel as ScriptedModel,
    ScriptedProvider as ScriptedProvider,
)
from pidurable.session._seams import (
    InlineBlocking as InlineBlocking,
    SeededRandomness as SeededRandomness,
    TrioClock as TrioClock,
)
from pidurable.testing._conformance_base import (
    ConformanceCase as ConformanceCase,
    StorageFactory as StorageFactory,
)
from pidurable.testing._conformance_suite import (
    ReopeningFactory as ReopeningFactory,
    conformance_cases as conformance_cases,
)
from pidurable.testing._failpoints import (
    CountPoints as CountPoints,
    Failpoints as Failpoints,
    KillAt as KillAt,
)
from pidurable.testing._faulty import (
    Fault as Fault,
    FaultyStorage as FaultyStorage,
    Gate as Gate,
    ReopeningStorage as ReopeningStorage,
)
