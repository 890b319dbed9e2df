"""What a build did and measured, as JSON, Markdown and HTML."""
