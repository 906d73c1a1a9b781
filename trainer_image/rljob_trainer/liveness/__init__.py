"""What hangs: how far a process is by its own account, who takes longer than its own history allows, and its stacks."""
