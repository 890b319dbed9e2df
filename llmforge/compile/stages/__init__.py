"""The stages of a build, a module each: `llmforge.compile.pipeline` runs them in their order."""
