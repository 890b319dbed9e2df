"""From a recipe to an artifact: `pipeline` is the picture of the whole, and the only room that knows all the others."""
