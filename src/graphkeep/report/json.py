"""Runs as one JSON object. Keys are those of the data file's records; `docs/cli.md` says what is put together how."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from graphkeep._watch._datafile import FORMAT, SCHEMA_VERSION
from graphkeep.report._run import Run


def dumps(runs: Sequence[Run]) -> str:
    """All that was recorded, as the text of one JSON object."""
    whole = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "runs": [as_dict(run) for run in runs]}
    return json.dumps(whole, allow_nan=False)  # without `indent`, with which it takes ten times as long


def as_dict(run: Run) -> dict[str, Any]:
    """One run."""
    return {
        "path": str(run.path),
        "header": run.header,
        "boundary": run.boundary,
        "begun_at": run.begun_at,
        "sources": run.sources,
        "sites": [vars(site) for site in run.sites.values()],
        "steps": [vars(step) for step in run.steps],
        "samples": [vars(sample) for sample in run.samples],
        "lives": [vars(life) for life in run.lives],
        "backwards": [vars(backward) for backward in run.backwards],
        "optimizer_steps": run.optimizer_steps,
        "mutations": run.mutations,
        "looks": [dataclasses.asdict(look) for look in run.looks],
        "notes": [vars(note) for note in run.notes],
        "deaths": run.deaths,
        "calls": run.calls,
        "peak": run.peak,
        "end": None if run.how is None else {"how": run.how, "error": run.error, "s": run.seconds},
        "unread": run.unread,
        "findings": [finding.as_dict() for finding in run.findings],
    }
