"""From logits to tokens: options, distribution, penalties, constraints, and the sampler that joins them."""
