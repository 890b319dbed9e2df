"""The stage of the checkpoint: its tensors are located, its weights are being read, its configuration is known."""

from __future__ import annotations

from llmforge.checkpoint.adapters import Merge
from llmforge.compile import chat_template, provenance
from llmforge.compile.state import CompileState
from llmforge.report import render
from llmforge.triton import sources


def open_checkpoint(state: CompileState) -> None:
    """Open the checkpoint and its adapters, and begin to read its weights.

    Meanwhile, what a build will want anyway is imported and read: the frontend imports torch, a thread hashes weights.
    """
    recipe = state.recipe
    checkpoint = state.overlap.weights.begin(*recipe.origin())
    state.notes += chat_template.choose(recipe, checkpoint)
    # As if they were merged: what is of another base is refused before anything is read.
    state.adapters = Merge.of(recipe.apart, checkpoint.tensors, checkpoint.path).adapters
    state.reuse.read_code(state.steps)
    sources.shipped()
    render.prepare()
    provenance.prepare()
    state.reuse.configure(checkpoint, state.clock)
    state.checkpoint = checkpoint
    state.notes += checkpoint.merge.notes if checkpoint.merge else ()
