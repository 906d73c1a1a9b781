"""The trainer's policy alone: shapes, rows, what they cost in operations, and what the device can do."""
