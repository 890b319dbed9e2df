"""Parts that sessions on a GPU share: memory, caches, inputs, captured graphs."""
