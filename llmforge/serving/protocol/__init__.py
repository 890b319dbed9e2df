"""Requests and answers as clients write and read them, over HTTP and in Triton alike."""
