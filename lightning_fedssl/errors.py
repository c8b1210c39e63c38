"""What a user reads when an input is wrong: one message that names the key or file and the remedy."""
