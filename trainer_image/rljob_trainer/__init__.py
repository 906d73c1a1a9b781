"""RLJob's trainer image: the driver with its agent loops, the FSDP2 trainer, and vLLM with our weight transfer."""
