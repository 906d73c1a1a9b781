"""What each command takes, declared for typer. Each imports what it runs when it is called, so that --help is fast."""
