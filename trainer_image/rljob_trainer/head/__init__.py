"""The process of the head Pod: reads its environment, connects the parts, and starts the driver."""
