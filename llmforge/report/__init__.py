"""The evidence of a build: its record, and how people read it (JSON, Markdown, HTML, terminal)."""
