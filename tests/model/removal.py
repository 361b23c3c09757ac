"""Removing a directory in an order that a power cut may end anywhere (runtime/worker/remove_tree.cc)."""

from __future__ import annotations

from .state import ASIDE, FINAL, NOWHERE, RETIRED, TORN, Rank, State, changed, value_of

STEPS = 3  # each is one step of the remover


def removed(state: State, index: int, step: int, bugs: frozenset[str]) -> State:
    """The state after a step of the removal of one directory, which is open since before the first step."""
    save, place = state.saves[index], state.place(index)
    if step == 0:
        if place in (ASIDE, RETIRED):
            # A half removed directory must not get its other name back.
            state = state.moved((index, RETIRED))
            state = state if "removed before the parent is synced" in bugs else state.parent_synced()
        record = changed(save.record, 0) if value_of(save.record) else save.record
        if place in (ASIDE, RETIRED):
            # A former checkpoint: the manifests last. Until then they tell its files from foreign ones.
            ranks = tuple(_without_data(rank) for rank in save.ranks)
        else:
            # A recovery may take this directory for complete: the manifests first.
            ranks = tuple(_without_manifest(rank) for rank in save.ranks)
        return state.with_save(index, save._replace(record=record, ranks=ranks))
    if step == 1:
        return state.directory_synced(index)
    ranks = tuple(_without_data(_without_manifest(rank)) for rank in save.ranks)
    state = state.with_save(index, save._replace(ranks=ranks))
    return state if place == FINAL else state.moved((index, NOWHERE))


def _without_manifest(rank: Rank) -> Rank:
    return rank._replace(manifest=changed(rank.manifest, 0)) if value_of(rank.manifest) else rank


def _without_data(rank: Rank) -> Rank:
    """A file is shortened before its name goes."""
    return rank._replace(data=changed(rank.data, 0), content=TORN) if value_of(rank.data) else rank
