"""What chats do: calls of tools, forms, refusals, thoughts, loops, languages; judged from answers, with no model here."""
