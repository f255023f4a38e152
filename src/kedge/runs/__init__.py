"""A run's folder: manifest and lineage, metrics, events, samples, atomic checkpoints, one writer at a time.

`kedge.runs.state` (tensors without pickle, random generators) imports torch, so it is not re-exported here.
"""

from kedge.runs.checkpoints import Checkpoint, Checkpoints, CheckpointSettings, Latest
from kedge.runs.folder import Run, RunTracker, runs_in, status_of
from kedge.runs.journal import Journal, JournalContents
from kedge.runs.lineage import Link, describe, lineage, locate
from kedge.runs.manifest import Artefact, Environment, Manifest, Status, new_manifest, read_manifest

__all__ = [
    "Artefact",
    "Checkpoint",
    "CheckpointSettings",
    "Checkpoints",
    "Environment",
    "Journal",
    "JournalContents",
    "Latest",
    "Link",
    "Manifest",
    "Run",
    "RunTracker",
    "Status",
    "describe",
    "lineage",
    "locate",
    "new_manifest",
    "read_manifest",
    "runs_in",
    "status_of",
]
