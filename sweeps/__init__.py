"""Many runs: what ran, and with what."""
