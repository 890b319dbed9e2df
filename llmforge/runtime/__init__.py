"""One step of an engine: what a session is given and gives, its configuration, and sampling."""
