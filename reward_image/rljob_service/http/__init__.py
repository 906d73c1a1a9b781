"""HTTP/1.1 connections: bytes to requests and back. Knows nothing of RLJob."""
