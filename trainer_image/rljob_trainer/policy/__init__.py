"""One FSDP2 rank: model, optimizer, micro-batches and checkpoints. No Ray, no HTTP."""
