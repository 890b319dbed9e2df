"""The chat template of a build: the checkpoint's, or the recipe's, which stands in its place for all that follows."""

from __future__ import annotations

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import Checkpoint
from llmforge.recipe import Recipe


def check(recipe: Recipe) -> None:
    """Read the template that a recipe names.

    Raises:
        InputError: it cannot be read, is too large or not UTF-8, or has a syntax error.
    """
    if recipe.chat_template is not None:
        from llmforge.serving.chat import ChatTemplate  # brings ONNX Runtime, for which a recipe is not to wait

        ChatTemplate.of_file(recipe.chat_template, {})


def choose(recipe: Recipe, checkpoint: Checkpoint) -> list[str]:
    """Give a checkpoint the template that the recipe asks for; return what is to be said of it.

    Raises:
        InputError, UsageError: as `check`, or the tool prompt cannot be added.
        CheckpointError: there is no template to add it to.
        EnvironmentLacks: no process can be started to render.
    """
    from llmforge.serving.chat import ChatTemplate
    from llmforge.serving.protocol import tool_prompt

    notes, file = [], recipe.chat_template
    if file is not None:
        checkpoint.chat_template = ChatTemplate.of_file(file, checkpoint.special_tokens).source
        notes.append(f"chat template: {file.name}, in place of the checkpoint's")
    if recipe.tool_prompt is None:
        return notes
    where = str(checkpoint.path if file is None else file)
    if checkpoint.chat_template is None:
        raise CheckpointError(
            f"{where}: has no chat template, and {recipe.where('tool_prompt')} asks for tool_prompt",
            hint="give one: `chat_template: FILE`",
        )
    template = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens, where)
    made = tool_prompt.added(template)
    checkpoint.chat_template = made.source
    knows = "the chat template describes tools by itself" if made is template else "added to the chat template"
    return [*notes, f"tool prompt: {knows}"]
