"""The server's side of worker processes: start, isolation, requests and replacement."""
