"""What a machine has for a job: NVIDIA's GPUs and their driver, and the installed build of vLLM."""
