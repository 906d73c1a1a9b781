"""How long work may take by its own history, and which work takes longer: it hangs. Pure, with the caller's clock."""
