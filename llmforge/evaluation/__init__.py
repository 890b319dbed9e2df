"""Evidence: quality and latency beside the checkpoint, intervals, and the gates that decide on them."""
