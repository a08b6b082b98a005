"""Reason codes: stable strings that programs may compare, with one line of explanation each."""

from __future__ import annotations

BLOCKED = {
    "missing_definition": "No installed extension defines this task kind.",
    "definition_too_old": "The task was written by a newer version of its definition.",
    "migration_failed": "The definition could not migrate what an older version stored.",
    "checkpoint_unreadable": "The stored checkpoint does not fit the classes of the definition.",
    "crash_loop": "The process died again and again while this task was running.",
    "faulted": "The code of the task raised, and its faults are parked.",
    "interrupted": "A restart interrupted the task; it waits to be resumed.",
    "unknown_record": "A built-in record has a kind or shape that this version does not know.",
}

NOT_MOVING = {
    "ready": "The task is next in line.",
    "limit_reached": "As many tasks run as the limits allow.",
    "running": "The code of the task is running.",
    "waiting": "The task is parked until what it waits for is there.",
    "completing": "The outcome is decided; work below is still live.",
    "owner_cancelling": "A task above is being aborted.",
    "storage_refusing": "The storage refuses commits; a probe is written every second.",
    "not_started": "The harness has not been started yet.",
    "held_elsewhere": "Another process holds the session.",
    "holder_unconfirmed": "The holder has stored no sign of life for a lease; it starts nothing.",
    "closing": "The harness is closing; the task goes on at the next opening.",
    "retrying": "The phase raised and runs again at a stored moment.",
    "suspect": "The process died again and again while the task ran; suspects are tried in turn.",
    "aborting": "The task is to be aborted; its handler runs when nothing below is live.",
    "ended": "The task has ended; its outcome is final.",
}

UNANSWERED = {
    "no_model": "No model is configured, or its provider is not installed.",
    "no_folder": "The working directory of the conversation is gone; its detail says which.",
    "model_error": "The model request failed for good.",
    "context_overflow": "The conversation does not fit the model's context window.",
    "aborted": "The run was aborted.",
    "faulted": "The task that ran the turn faulted.",
    "orphaned": "The task that ran the turn was aborted without code to take it.",
    "turn_limit": "The run reached its most turns.",
    "handoff_limit": "Too many handoffs followed each other.",
    "stopped": "A hook stopped the run.",
    "reset": "A reset, or another change of the context, left nothing to answer.",
    "stale": "A newer summary had replaced the range already.",
    "withdrawn": "The input was taken back before it was placed.",
}

TOOL_ERRORS = {
    "tool_unavailable": "The tool is not installed, or not offered in this conversation.",
    "invalid_arguments": "The arguments do not fit the tool's schema.",
    "denied": "A person denied the call.",
    "blocked": "A hook blocked the call.",
    "interrupted": "The process died during the call; whether its effect happened is unknown.",
    "aborted": "The call was aborted.",
    "tool_error": "The tool raised an error.",
    "timeout": "The tool took longer than its limit.",
    "permission_expired": "Nobody decided the request in time.",
}

PERMISSIONS = {
    "granted": "A person, or a grant that a person gave, allowed it.",
    "denied": "A person denied it.",
    "expired": "Nobody decided in time.",
    "closed": "It cannot be decided any more; its reason says why.",
    "superseded": "What would run is not what was granted any more; the call asked again.",
    "gone": "The call ended without code of its own.",
}

ABORTS = {
    "user": "Somebody asked for it.",
    "deadline": "The deadline of the task passed.",
    "owner": "The owner of the task was aborted or did not complete.",
    "join": "A join policy ended the siblings that were no longer needed.",
    "restart": "The process restarted and the task was created with on_restart='abort'.",
}

RESUME = {
    "continue": "Nothing is repeated: the task goes on from its last checkpoint.",
    "resend": "The model request is sent again, exactly as it was; what was cut is kept.",
    "rerun": "The call had begun and is safe to run again, with the same arguments.",
    "reconcile": "The call had begun; its tool is asked what became of it.",
    "interrupt": "The effect may have happened: it is not repeated, and the model is told so.",
    "park": "The effect may have happened: a person decides.",
    "ask": "A person is asked already; it goes on once that is decided.",
    "blocked": "The task waits for somebody.",
    "abort": "The task is being aborted, which goes on.",
    "terminal": "There is nothing to continue: the last answer is complete, or nothing was asked.",
    "held": "The run before this input had no answer; the next prompt takes it along.",
}


def explain_code(code: str) -> str | None:
    """Return the explanation of a reason code, or None for an unknown one."""
    for table in (BLOCKED, NOT_MOVING, UNANSWERED, TOOL_ERRORS, PERMISSIONS, ABORTS, RESUME):
        if code in table:
            return table[code]
    return None
