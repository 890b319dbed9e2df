"""From requests to streams of text: engine, scheduler, sequences, prefix cache, speculation."""
