"""Retrieval: queries and passages, how well an embedder finds them, and how a reranker orders them."""
