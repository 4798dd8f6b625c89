"""Several workloads as one: on one clock (`merge`), or one after another (`concat`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slacktide.errors import InputError
from slacktide.workload.requests import COLUMNS, Workload


def merge(workloads: Sequence[Workload], name: str | None = None) -> Workload:
    """All requests of several workloads on one clock, sorted by arrival (ties: in the order of the list).

    Labels with the same text are the same tenant, class or session. Hash ids are kept apart (each workload's ids are
    shifted beyond those before it) and must have one block size. Raises InputError for closed loops or an empty list.
    """
    if not workloads:
        raise InputError("merge: no workloads")
    if any(part.closed is not None for part in workloads):
        raise InputError("merge: a closed loop cannot be merged with other arrivals")
    changes: dict[str, Any] = {c: np.concatenate([getattr(p, c) for p in workloads]) for c in COLUMNS}
    for column, labels in (("tenant", "tenants"), ("slo_class", "slo_classes"), ("session", "sessions")):
        table: dict[str, int] = {}
        codes = []
        for part in workloads:
            mapped = [table.setdefault(label, len(table)) for label in getattr(part, labels)]
            lookup = np.array([*mapped, -1], dtype=np.int64)  # code -1 (no session) picks the last entry
            codes.append(lookup[getattr(part, column)])
        changes[column], changes[labels] = np.concatenate(codes), tuple(table)
    notes = tuple(dict.fromkeys(note for part in workloads for note in part.notes))
    return Workload(
        **changes,
        **_merged_hashes(workloads),
        name=name or "+".join(p.name for p in workloads),
        source="; ".join(dict.fromkeys(p.source for p in workloads if p.source)),
        notes=notes,
    )


def concat(workloads: Sequence[Workload], gap: float = 0.0, name: str | None = None) -> Workload:
    """Workloads one after another in time: each starts `gap` seconds after the last arrival of the one before."""
    shifted, start = [], 0.0
    for part in workloads:
        moved = part.with_arrivals(part.arrival_time - part.arrival_time[0] + start)
        shifted.append(moved)
        start = float(moved.arrival_time[-1]) + gap
    return merge(shifted, name)


def _merged_hashes(workloads: Sequence[Workload]) -> dict[str, Any]:
    if all(part.hash_ids is None for part in workloads):
        return {}
    sizes = {part.hash_block_size for part in workloads if part.hash_ids is not None}
    if len(sizes) > 1:
        raise InputError(f"merge: hash_ids of different block sizes {sorted(sizes)}")
    values, counts, shift = [], [], 0
    for part in workloads:
        ids, offsets = part.hash_ids or (np.empty(0, dtype=np.int64), np.zeros(len(part) + 1, dtype=np.int64))
        dense = np.unique(ids, return_inverse=True)[1].astype(np.int64)  # 0.. without gaps: the ids' size is free
        values.append(dense + shift)
        counts.append(np.diff(offsets))
        shift += int(dense.max(initial=-1)) + 1
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
    return {"hash_ids": (np.concatenate(values), offsets), "hash_block_size": sizes.pop()}
