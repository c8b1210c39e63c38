"""How the clients of a round are trained on one device."""
