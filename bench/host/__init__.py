"""Where a server's time goes beside its forwards."""
