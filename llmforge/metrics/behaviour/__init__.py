"""What chats do: calls of tools, forms, refusals, thoughts, loops, languages. No model is in here, only its answers."""
