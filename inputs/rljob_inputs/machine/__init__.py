"""What a machine has for a job: NVIDIA's GPUs and their driver, the installed extras and the build of vLLM."""
