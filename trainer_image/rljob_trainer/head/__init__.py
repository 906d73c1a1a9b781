"""The process of the head Pod: reads its environment, wires the components, and runs the driver."""
