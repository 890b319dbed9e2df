"""The passes, one flat file each, and the explicit tuple of all of them."""
