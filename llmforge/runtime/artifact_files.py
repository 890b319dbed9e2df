"""Names of files of an artifact, as builders write and the runtime reads them."""

TEMPLATE_FILE = "chat_template.jinja"
# Files that tell what `bos_token`, `eos_token`, … of a template stand for; the later one wins.
SPECIAL_TOKEN_FILES = ("special_tokens_map.json", "tokenizer_config.json")
TOKENIZER_FILES = ("tokenizer.json", *SPECIAL_TOKEN_FILES)
PENDING_FILE = "pending.json"  # stands in an engine's folder until the engine is built (llmforge.backends.pending)
